/* A msgpack parser that reads the bytes in place. It allocates nothing for what a header announces. */
#include "reader.h"

#include <stdlib.h>
#include <string.h>

/* Reads a big-endian number of `size` bytes. */
static bool take(Bytes *in, size_t size, uint64_t *value) {
    if (length_of(*in) < size) return false;
    for (*value = 0; size--; in->at++) *value = *value << 8 | *in->at;
    return true;
}

static bool take_bytes(Bytes *in, uint64_t size, Bytes *bytes) {
    if (length_of(*in) < size) return false;
    *bytes = (Bytes){in->at, in->at + size};
    in->at += size;
    return true;
}

bool next_item(Bytes *in, Item *item) {
    uint64_t b, n;
    *item = (Item){0};
    if (!take(in, 1, &b)) return false;
    if (b <= 0x7f || b >= 0xe0) {
        item->kind = INTEGER;
        item->negative = b >= 0xe0;
        item->number = (uint64_t)(int64_t)(int8_t)b;
        return true;
    }
    if (b <= 0x9f) {
        item->kind = b <= 0x8f ? MAP : ARRAY;
        item->count = b & 0x0f;
        return true;
    }
    if (b <= 0xbf) {
        item->kind = STR;
        return take_bytes(in, b & 0x1f, &item->bytes);
    }
    switch (b) {
        case 0xc0:
            item->kind = NIL;
            return true;
        case 0xc1: /* msgpack never uses this byte. */
            return false;
        case 0xc2:
        case 0xc3:
            item->kind = BOOLEAN;
            item->number = b & 1;
            return true;
        case 0xc4:
        case 0xc5:
        case 0xc6:
            item->kind = BIN;
            return take(in, (size_t)1 << (b - 0xc4), &n) && take_bytes(in, n, &item->bytes);
        case 0xc7:
        case 0xc8:
        case 0xc9:
        case 0xd4:
        case 0xd5:
        case 0xd6:
        case 0xd7:
        case 0xd8: {
            uint64_t type;
            item->kind = EXT;
            if (b >= 0xd4)
                n = UINT64_C(1) << (b - 0xd4);
            else if (!take(in, (size_t)1 << (b - 0xc7), &n))
                return false;
            if (!take(in, 1, &type)) return false;
            item->type = (int8_t)type;
            return take_bytes(in, n, &item->bytes);
        }
        case 0xca: {
            float narrow;
            double wide;
            item->kind = FLOAT;
            if (!take(in, 4, &n)) return false;
            uint32_t bits = (uint32_t)n;
            memcpy(&narrow, &bits, 4);
            wide = narrow;
            memcpy(&item->number, &wide, 8);
            return true;
        }
        case 0xcb:
            item->kind = FLOAT;
            return take(in, 8, &item->number);
        case 0xcc:
        case 0xcd:
        case 0xce:
        case 0xcf:
            item->kind = INTEGER;
            return take(in, (size_t)1 << (b - 0xcc), &item->number);
        case 0xd0:
        case 0xd1:
        case 0xd2:
        case 0xd3: {
            size_t size = (size_t)1 << (b - 0xd0);
            item->kind = INTEGER;
            if (!take(in, size, &n)) return false;
            item->negative = n >> (8 * size - 1);
            if (item->negative && size < 8) n |= ~UINT64_C(0) << (8 * size);
            item->number = n;
            return true;
        }
        case 0xd9:
        case 0xda:
        case 0xdb:
            item->kind = STR;
            return take(in, (size_t)1 << (b - 0xd9), &n) && take_bytes(in, n, &item->bytes);
        default: /* 0xdc to 0xdf. */
            item->kind = b <= 0xdd ? ARRAY : MAP;
            if (!take(in, b & 1 ? 4 : 2, &n)) return false;
            item->count = (uint32_t)n;
            return true;
    }
}

bool skip_value(Bytes *in) {
    Item item;
    /* The values are counted, because recursion could overflow the stack. */
    for (uint64_t values = 1; values > 0; values--) {
        if (!next_item(in, &item)) return false;
        values += item.kind == MAP ? 2 * (uint64_t)item.count : item.count;
    }
    return true;
}

void push_key(Keys *keys, Bytes key) {
    keys->items = grow(keys->items, keys->count, &keys->room, sizeof *keys->items);
    keys->items[keys->count++] = key;
}

bool pop_keys(Keys *keys, size_t first, int (*compare)(const void *, const void *)) {
    size_t count = keys->count - first;
    bool twice = false;
    if (count > 1) qsort(keys->items + first, count, sizeof *keys->items, compare);
    for (size_t i = first + 1; i < keys->count; i++) twice |= compare(&keys->items[i - 1], &keys->items[i]) == 0;
    keys->count = first;
    return twice;
}

int compare_decoded_keys(const void *a, const void *b) { return compare_bytes(*(const Bytes *)a, *(const Bytes *)b); }

int compare_packed_keys(const void *a, const void *b) {
    Item x, y;
    Bytes in_a = *(const Bytes *)a, in_b = *(const Bytes *)b;
    next_item(&in_a, &x);
    next_item(&in_b, &y);
    if (x.kind != y.kind) return x.kind < y.kind ? -1 : 1;
    if (x.negative != y.negative) return x.negative ? -1 : 1;
    if (x.number != y.number) return x.number < y.number ? -1 : 1;
    return compare_bytes(x.bytes, y.bytes);
}
