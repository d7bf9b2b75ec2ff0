/* Errors, memory, text, digests and files. */
#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

FILE *report;

void fail(const char *rule, const char *file, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    char *line = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&line, &size);
    if (out) {
        vfprintf(out, format, arguments);
        fclose(out);
    }
    va_end(arguments);
    for (size_t i = 0; i < size; i++) /* A name in it must not begin a new line. */
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f) line[i] = '?';
    fprintf(report, "%s %s: %s\n", rule ? rule : "error", file, line ? line : "");
    free(line);
    exit(rule ? 1 : 2);
}

void *allocate(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) fail(NULL, "memory", "there is none for %zu times %zu bytes", count, size);
    return memory;
}

void *grow(void *items, size_t count, size_t *room, size_t size) {
    if (count < *room) return items;
    *room = *room ? 2 * *room : 16;
    items = realloc(items, *room * size);
    if (!items) fail(NULL, "memory", "there is none for %zu times %zu bytes", *room, size);
    return items;
}

size_t length_of(Bytes text) { return (size_t)(text.end - text.at); }

int compare_bytes(Bytes a, Bytes b) {
    size_t n = length_of(a), m = length_of(b);
    int order = n && m ? memcmp(a.at, b.at, n < m ? n : m) : 0;
    return order ? order : (n > m) - (n < m);
}

bool equals(Bytes text, const char *expected) {
    size_t n = strlen(expected);
    return length_of(text) == n && (n == 0 || memcmp(text.at, expected, n) == 0);
}

bool is_utf8(Bytes text) {
    while (text.at < text.end) {
        uint8_t first = *text.at++;
        if (first < 0x80) continue;
        int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
        if (first < 0xc2 || first > 0xf4 || text.end - text.at < more) return false;
        uint8_t second = *text.at;
        /* An overlong form of 3 bytes; a surrogate; an overlong form of 4 bytes; a number above U+10FFFF. */
        if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
            (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f))
            return false;
        while (more--)
            if ((*text.at++ & 0xc0) != 0x80) return false;
    }
    return true;
}

bool has_control_character(Bytes utf8) {
    for (const uint8_t *p = utf8.at; p < utf8.end; p++)
        if (*p < 0x20 || *p == 0x7f || (*p == 0xc2 && p[1] < 0xa0)) return true;
    return false;
}

bool read_decimal(Bytes *in, uint64_t *value) {
    const uint8_t *begin = in->at;
    for (*value = 0; in->at < in->end && *in->at >= '0' && *in->at <= '9'; in->at++) {
        if (*value > UINT_LIMIT / 10) return false;
        *value = *value * 10 + (uint64_t)(*in->at - '0');
        if (*value >= UINT_LIMIT) return false;
    }
    return in->at > begin && (*begin != '0' || in->at == begin + 1);
}

/* Returns the position of the `@` if the name ends in `@<digits>:<digits>`, and NULL otherwise. */
static const uint8_t *range_suffix(Bytes name) {
    const uint8_t *p = name.end;
    for (int numbers = 0; numbers < 2; numbers++) {
        const uint8_t *end = p;
        while (p > name.at && p[-1] >= '0' && p[-1] <= '9') p--;
        if (p == end || p == name.at || *--p != (numbers ? '@' : ':')) return NULL;
    }
    return p;
}

void check_name(Bytes name, const char *file) {
    if (!length_of(name) || length_of(name) > 1024) fail("N001", file, "a name of %zu bytes", length_of(name));
    if (!is_utf8(name)) fail("N001", file, "a name that is not UTF-8");
    if (has_control_character(name)) fail("N001", file, "a name with a control character");
    if (*name.at == '@' || equals(name, "__metadata__") || range_suffix(name))
        fail("N002", file, "the name %.*s", (int)length_of(name), (const char *)name.at);
}

bool is_save_id(Bytes text) {
    if (length_of(text) != 16) return false;
    for (; text.at < text.end; text.at++)
        if (!((*text.at >= '0' && *text.at <= '9') || (*text.at >= 'a' && *text.at <= 'f'))) return false;
    return true;
}

bool has_digest(const void *data, size_t size, const uint8_t *digest) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, size));
    return memcmp(canonical.digest, digest, 16) == 0;
}

bool exists_at(int parent, const char *name) {
    struct stat status;
    return fstatat(parent, name, &status, AT_SYMLINK_NOFOLLOW) == 0;
}

/* Opens a regular file or a directory. The kind is also compared before the file is opened, because opening a device
   may change it. */
static int open_kind(int parent, const char *name, const char *path, mode_t kind, uint64_t *size) {
    struct stat status;
    if (fstatat(parent, name, &status, AT_SYMLINK_NOFOLLOW)) {
        if (errno == ENOENT) fail("F001", path, "is missing");
        fail(NULL, path, "%s", strerror(errno));
    }
    const char *what = kind == S_IFDIR ? "directory" : "regular file";
    if ((status.st_mode & S_IFMT) != kind) fail("F002", path, "is no %s", what);
    int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | (kind == S_IFDIR ? O_DIRECTORY : 0);
    int file = openat(parent, name, flags);
    if (file < 0 && errno == ENOENT) fail("F001", path, "is missing");
    if (file < 0 && (errno == ELOOP || errno == ENOTDIR)) fail("F002", path, "is a link");
    if (file < 0 || fstat(file, &status)) fail(NULL, path, "%s", strerror(errno));
    if ((status.st_mode & S_IFMT) != kind) fail("F002", path, "is no %s", what);
    *size = (uint64_t)status.st_size;
    return file;
}

int open_file(int parent, const char *name, const char *path, uint64_t *size) {
    return open_kind(parent, name, path, S_IFREG, size);
}

int open_directory(int parent, const char *name, const char *path) {
    uint64_t unused;
    return open_kind(parent, name, path, S_IFDIR, &unused);
}

bool read_at(int file, uint64_t offset, void *buffer, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t n = pread(file, (char *)buffer + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail(NULL, "read", "%s", strerror(errno));
        if (n == 0) return false;
        done += (size_t)n;
    }
    return true;
}
