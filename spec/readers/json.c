/* A strict JSON parser that reads the text in place. The rules need details that libraries for C do not show: jansson,
   for example, returns 0 for `-0`, and refuses U+0000 in a key, integers of 2^63 and more, and lone surrogates. */
#include "reader.h"

#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 64 /* A header that conforms has three levels. */

static void skip_space(Bytes *in) {
    while (in->at < in->end && (*in->at == ' ' || *in->at == '\t' || *in->at == '\n' || *in->at == '\r')) in->at++;
}

static bool accept(Bytes *in, char c) {
    if (in->at == in->end || *in->at != (uint8_t)c) return false;
    in->at++;
    return true;
}

static bool is_digit(const Bytes *in) { return in->at < in->end && *in->at >= '0' && *in->at <= '9'; }

static bool skip_digits(Bytes *in) {
    if (!is_digit(in)) return false;
    while (is_digit(in)) in->at++;
    return true;
}

static bool check_number(Bytes *in) {
    Bytes number = {in->at, NULL};
    accept(in, '-');
    if (!accept(in, '0') && !skip_digits(in)) return false;
    number.end = in->at;
    bool integer = true;
    if (accept(in, '.')) {
        integer = false;
        if (!skip_digits(in)) return false;
    }
    if (accept(in, 'e') || accept(in, 'E')) {
        integer = false;
        if (!accept(in, '+')) accept(in, '-');
        if (!skip_digits(in)) return false;
    }
    return !(integer && equals(number, "-0")) && !is_digit(in); /* A digit here follows a leading zero. */
}

static int hex_digit(uint8_t c) {
    if (c >= '0' && c <= '9') return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool take_hex4(Bytes *in, unsigned *value) {
    if (length_of(*in) < 4) return false;
    *value = 0;
    for (int i = 0; i < 4; i++) {
        int digit = hex_digit(*in->at++);
        if (digit < 0) return false;
        *value = *value << 4 | (unsigned)digit;
    }
    return true;
}

/* Checks a string of a text that is UTF-8. */
static bool check_string(Bytes *in) {
    static const char escapes[] = "\"\\/bfnrt";
    if (!accept(in, '"')) return false;
    while (in->at < in->end) {
        uint8_t c = *in->at++;
        unsigned unit;
        if (c == '"') return true;
        if (c < 0x20) return false;
        if (c != '\\') continue;
        if (accept(in, 'u')) {
            if (!take_hex4(in, &unit)) return false;
        } else if (in->at == in->end || *in->at == 0 || !strchr(escapes, *in->at++)) {
            return false;
        }
    }
    return false;
}

static bool check_word(Bytes *in, const char *word) {
    for (; *word; word++)
        if (!accept(in, *word)) return false;
    return true;
}

static bool check_value(Bytes *in, int depth, Keys *keys, uint8_t **room) {
    skip_space(in);
    if (in->at == in->end) return false;
    uint8_t first = *in->at;
    if (first == '"') return check_string(in);
    if (first == 't') return check_word(in, "true");
    if (first == 'f') return check_word(in, "false");
    if (first == 'n') return check_word(in, "null");
    if (first != '{' && first != '[') return check_number(in);
    if (depth == MAX_DEPTH) return false;
    in->at++;
    char end = first == '{' ? '}' : ']';
    size_t first_key = keys->count;
    skip_space(in);
    for (bool empty = accept(in, end); !empty;) {
        if (first == '{') {
            skip_space(in);
            Bytes key = *in;
            if (!check_string(in)) return false;
            push_key(keys, json_string(&key, room));
            skip_space(in);
            if (!accept(in, ':')) return false;
        }
        if (!check_value(in, depth + 1, keys, room)) return false;
        skip_space(in);
        if (accept(in, end)) break;
        if (!accept(in, ',')) return false;
    }
    return !pop_keys(keys, first_key, compare_decoded_keys);
}

bool json_is_strict_object(Bytes text) {
    if (text.at == text.end || *text.at != '{' || !is_utf8(text)) return false;
    uint8_t *decoded = allocate(length_of(text), 1), *room = decoded; /* A decoded string is never longer. */
    Keys keys = {0};
    bool good = check_value(&text, 0, &keys, &room);
    free(keys.items);
    free(decoded);
    while (good && text.at < text.end) good = *text.at++ == ' ';
    return good;
}

bool json_next(Bytes *in) {
    skip_space(in);
    in->at++; /* An opening bracket, a comma, or a closing bracket. */
    if (in->at[-1] == ']' || in->at[-1] == '}') return false;
    skip_space(in);
    if (*in->at != ']' && *in->at != '}') return true;
    in->at++;
    return false;
}

char json_kind(Bytes *in) {
    skip_space(in);
    return (char)*in->at;
}

/* Reads the digits behind `\u`, and the second half of a surrogate pair. */
static unsigned take_code_point(Bytes *in) {
    unsigned unit = 0, second = 0;
    take_hex4(in, &unit);
    if (unit >= 0xd800 && unit < 0xdc00 && length_of(*in) >= 6 && in->at[0] == '\\' && in->at[1] == 'u') {
        Bytes ahead = {in->at + 2, in->end};
        if (take_hex4(&ahead, &second) && second >= 0xdc00 && second < 0xe000) {
            in->at = ahead.at;
            return 0x10000 + ((unit - 0xd800) << 10) + (second - 0xdc00);
        }
    }
    return unit;
}

static uint8_t *put_utf8(uint8_t *out, unsigned code) {
    if (code < 0x80) {
        *out++ = (uint8_t)code;
        return out;
    }
    int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const uint8_t first[] = {0, 0xc0, 0xe0, 0xf0};
    *out++ = (uint8_t)(first[more] | code >> (6 * more));
    while (more--) *out++ = (uint8_t)(0x80 | (code >> (6 * more) & 0x3f));
    return out;
}

Bytes json_string(Bytes *in, uint8_t **room) {
    static const char escaped[] = "bfnrt", meaning[] = "\b\f\n\r\t";
    uint8_t *begin = *room, *out = begin;
    skip_space(in);
    for (in->at++; *in->at != '"';) {
        uint8_t c = *in->at++;
        if (c != '\\') {
            *out++ = c;
        } else if (accept(in, 'u')) {
            out = put_utf8(out, take_code_point(in));
        } else {
            const char *known = strchr(escaped, *in->at);
            *out++ = known ? (uint8_t)meaning[known - escaped] : *in->at;
            in->at++;
        }
    }
    in->at++;
    *room = out;
    return (Bytes){begin, out};
}

Bytes json_key(Bytes *in, uint8_t **room) {
    Bytes key = json_string(in, room);
    skip_space(in);
    in->at++; /* The colon. */
    return key;
}

bool json_uint(Bytes *in, uint64_t *value) {
    skip_space(in);
    Bytes text = *in;
    json_skip(in);
    text.end = in->at;
    return read_decimal(&text, value) && text.at == text.end;
}

void json_skip(Bytes *in) {
    skip_space(in);
    int depth = 0;
    do { /* Each turn reads one token. */
        uint8_t c = *in->at;
        if (c == '"') {
            for (in->at++; *in->at != '"'; in->at++) in->at += *in->at == '\\';
            in->at++;
        } else if (c == '{' || c == '[') {
            depth++;
            in->at++;
        } else if (c == '}' || c == ']') {
            depth--;
            in->at++;
        } else if (c == ',' || c == ':') {
            in->at++;
        } else { /* A number, true, false or null. */
            while (in->at < in->end && !strchr(" \t\n\r,]}", *in->at)) in->at++;
        }
        if (depth) skip_space(in);
    } while (depth);
}
