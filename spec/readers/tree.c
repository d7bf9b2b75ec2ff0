/* Section 8 of the format: state trees. */
#include "reader.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const Checkpoint *c;
    const char *where;
    uint64_t bytes, containers;
    Keys keys;
    const Part *state; /* The part `state`, or NULL if there is none. */
    bool *referred;    /* Whether a reference has named a tensor, for each tensor of that part. */
} Tree;

static const Part *state_part(const Checkpoint *c, uint32_t *number) {
    static const uint8_t name[] = "state";
    return find_part(c, (Bytes){name, name + 5}, number) ? &c->parts[*number] : NULL;
}

static void count_container(Tree *t) {
    if (++t->containers > 1 << 22) fail("T004", t->where, "a tree has more than 2^22 arrays and maps");
}

static void count_bytes(Tree *t, Bytes packed) {
    t->bytes += length_of(packed);
    if (t->bytes > 256 * MEBI) fail("T004", t->where, "a tree has more than 256 MiB");
}

static void check_reference(Tree *t, Bytes name) {
    uint32_t id, row;
    if (!is_utf8(name)) fail("T001", t->where, "a reference is not UTF-8");
    if (!t->state || !find_name(t->c, name, &id) || !find_row(t->state, id, &row))
        fail("T003", t->where, "a reference names no tensor of the part `state`: %.*s", (int)length_of(name),
             (const char *)name.at);
    if (t->referred[row])
        fail("T003", t->where, "two references name %.*s", (int)length_of(name), (const char *)name.at);
    t->referred[row] = true;
}

static void check_big_integer(const Tree *t, Bytes text) {
    bool negative = length_of(text) && *text.at == '-';
    Bytes digits = {text.at + negative, text.end};
    size_t size = length_of(digits);
    bool good = size >= 1 && size <= 4000 && *digits.at != '0';
    for (const uint8_t *p = digits.at; p < digits.end; p++) good &= *p >= '0' && *p <= '9';
    const char *limit =
        negative ? "9223372036854775808" : "18446744073709551615"; /* The last number that is of the kind integer. */
    size_t width = strlen(limit);
    if (!good || size < width || (size == width && memcmp(digits.at, limit, width) <= 0))
        fail("T001", t->where, "a big integer is no number, or one that an int can hold");
}

static void check_value(Tree *t, Bytes *in, int level);

/* Checks that the bytes are one msgpack value. This is done before the depth is checked (T002). */
static void check_whole(const Tree *t, Bytes in) {
    if (!skip_value(&in) || in.at != in.end)
        fail("T001", t->where, "the bytes of a tree, or of a payload, are not one msgpack value");
}

/* Checks a value of the kind `kind` that is packed in a payload. */
static void check_packed(Tree *t, Bytes in, Kind kind, int level) {
    Item item;
    Bytes ahead = in;
    check_whole(t, in);
    if (!next_item(&ahead, &item) || item.kind != kind)
        fail("T001", t->where, "a payload is of another kind than its extension needs");
    check_value(t, &in, level);
}

static void check_named_map(Tree *t, Bytes in, int level) {
    Item array, name;
    count_bytes(t, in);
    if (!next_item(&in, &array) || array.kind != ARRAY || array.count != 2 || !next_item(&in, &name) ||
        name.kind != STR || !(equals(name.bytes, "OrderedDict") || equals(name.bytes, "Counter")))
        fail("T001", t->where, "a named map is not an array of a known name and a map");
    count_container(t);
    check_packed(t, in, MAP, level);
}

static void check_value(Tree *t, Bytes *in, int level) {
    Item item;
    if (level > 64) fail("T002", t->where, "a tree is deeper than 64 levels");
    next_item(in, &item);
    if (item.kind == STR && !is_utf8(item.bytes)) fail("T001", t->where, "a string is not UTF-8");
    if (item.kind == EXT) {
        switch (item.type) {
            case 1:
            case 2:
                check_reference(t, item.bytes);
                return;
            case 3:
                count_bytes(t, item.bytes);
                check_packed(t, item.bytes, ARRAY, level);
                return;
            case 4:
                check_big_integer(t, item.bytes);
                return;
            case 5:
                check_named_map(t, item.bytes, level);
                return;
            default:
                fail("T001", t->where, "a tree has an extension of type %d", item.type);
        }
    }
    if (item.kind != ARRAY && item.kind != MAP) return;
    count_container(t);
    size_t first_key = t->keys.count;
    for (uint32_t i = 0; i < item.count; i++) {
        if (item.kind == MAP) {
            Item key;
            Bytes packed = *in;
            next_item(in, &key);
            if (!(key.kind == INTEGER || (key.kind == STR && is_utf8(key.bytes))))
                fail("T001", t->where, "a key is neither str nor int");
            packed.end = in->at;
            push_key(&t->keys, packed);
        }
        check_value(t, in, level + 1);
    }
    if (pop_keys(&t->keys, first_key, compare_packed_keys)) fail("T001", t->where, "a map has a key twice");
}

void check_tree(const Checkpoint *c, Bytes tree, const char *where) {
    uint32_t number;
    Tree t = {.c = c, .where = where, .state = state_part(c, &number)};
    if (t.state) t.referred = allocate(t.state->count, sizeof *t.referred);
    count_bytes(&t, tree);
    check_whole(&t, tree);
    check_value(&t, &tree, 0);
    free(t.referred);
    free(t.keys.items);
}

uint8_t *load_rank_tree(Checkpoint *c, uint64_t rank, uint64_t *size) {
    uint32_t number, id, row;
    const Part *state = state_part(c, &number);
    char name[32];
    snprintf(name, sizeof name, "rank/%" PRIu64, rank);
    Bytes wanted = {(uint8_t *)name, (uint8_t *)strchr(name, 0)};
    if (rank >= c->world_size || !state || !find_name(c, wanted, &id) || !find_row(state, id, &row)) return NULL;
    const Shape *shape = shape_of(c, number, row);
    if (strcmp(DTYPES[state->dtypes[row]].name, "U8") || shape->dimensions != 1)
        fail("T001", name, "is not U8 and one-dimensional");
    if (shape->product.elements > 256 * MEBI) fail("T004", name, "a tree has more than 256 MiB");
    uint8_t *tree = load_tensor(c, number, row, 0, size);
    check_tree(c, (Bytes){tree, tree + *size}, name);
    return tree;
}
