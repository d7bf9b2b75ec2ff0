/* Sections 3 and 4 of the format: how a checkpoint is found, and the manifest. */
#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MANIFEST "manifest.msgpack"
#define MAX_NESTING 64 /* The deepest level of arrays and maps in the body. The value of a field is at level 1. */
#define MAX_CONTAINERS (1 << 22)

const Dtype DTYPES[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},   {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I16", 2},
                        {"U16", 2},  {"F16", 2}, {"BF16", 2}, {"I32", 4},     {"U32", 4},     {"F32", 4},
                        {"I64", 8},  {"U64", 8}, {"F64", 8},  {"C64", 8},     {NULL, 0}};

int find_dtype(Bytes name) {
    for (int i = 0; DTYPES[i].name; i++)
        if (equals(name, DTYPES[i].name)) return i;
    return -1;
}

bool multiply(Product *product, uint64_t dimension) {
    uint64_t factor = dimension ? dimension : 1;
    if (product->padded > (UINT_LIMIT - 1) / factor) return false;
    product->padded *= factor;
    product->elements = dimension && product->elements ? product->padded : 0;
    return true;
}

void get_dimensions(const Shape *shape, uint64_t dimensions[MAX_DIMENSIONS]) {
    Bytes in = shape->packed;
    Item item;
    for (uint32_t i = 0; i < shape->dimensions; i++) {
        next_item(&in, &item);
        dimensions[i] = item.number;
    }
}

/* ---- finding the checkpoint ---- */

/* Checks L001 and returns the directory that `latest` names. */
static int follow_latest(int run) {
    uint64_t size;
    char content[257];
    int file = open_file(run, "latest", "latest", &size);
    if (size > 256) fail("L001", "latest", "has %" PRIu64 " bytes", size);
    if (!read_at(file, 0, content, (size_t)size)) fail("L001", "latest", "has become shorter");
    close(file);
    if (size && content[size - 1] == '\n') size--;
    content[size] = 0;
    Bytes path = {(uint8_t *)content, (uint8_t *)content + size};
    if (!is_utf8(path) || has_control_character(path)) fail("L001", "latest", "is no text of one line");
    int directory = run;
    bool several = memchr(content, '/', (size_t)size);
    for (char *component = content, *end; component; component = end) {
        end = strchr(component, '/');
        if (end) *end++ = 0;
        if (!*component || !strcmp(component, ".") || !strcmp(component, ".."))
            fail("L001", "latest", "has the component \"%s\"", component);
    }
    for (char *component = content; component <= content + size; component += strlen(component) + 1) {
        if (several) {
            if (!exists_at(directory, component)) fail("L001", "latest", "nothing is at its component %s", component);
            directory = open_directory(directory, component, component);
        } else {
            directory = openat(directory, component, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            if (directory < 0) fail("L001", "latest", "no directory is at %s", component);
        }
    }
    if (!exists_at(directory, MANIFEST)) fail("L001", "latest", "names a directory without a manifest");
    return directory;
}

static int find_directory(const char *path) {
    int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) fail(NULL, path, "%s", strerror(errno));
    if (exists_at(directory, MANIFEST)) return directory;
    if (exists_at(directory, "latest")) return follow_latest(directory);
    fail(NULL, path, "there is no checkpoint");
}

/* ---- the envelope ---- */

/* Writes a number in the shortest of the formats `format`, `format` + 1 and so on, which have 1, 2, 4 and 8 bytes. */
static uint8_t *put_shortest(uint8_t *out, uint8_t format, uint64_t number) {
    size_t size = 1;
    for (; size < 8 && number >> (8 * size); size *= 2) format++;
    *out++ = format;
    while (size--) *out++ = (uint8_t)(number >> (8 * size));
    return out;
}

/* Takes the steps 4 to 8 of the order of the checks, and returns the body. */
static Bytes open_envelope(Bytes file, uint64_t version[2]) {
    static const uint8_t name[6] = {0xa5, 'z', 'c', 'k', 'p', 't'};
    Bytes in = file;
    Item array, item, digest, body;
    if (!next_item(&in, &array) || array.kind != ARRAY || array.count < 2)
        fail("M001", MANIFEST, "is no msgpack array");
    if (length_of(in) < sizeof name || memcmp(in.at, name, sizeof name)) fail("M001", MANIFEST, "is not one of zckpt");
    in.at += sizeof name;
    Bytes versions = in;
    if (!skip_value(&in)) fail("M001", MANIFEST, "ends in the version");
    versions.end = in.at;
    if (!next_item(&versions, &item) || item.kind != ARRAY || item.count != 2) fail("M002", MANIFEST, "has no version");
    for (int i = 0; i < 2; i++) {
        if (!next_item(&versions, &item) || item.kind != INTEGER || item.negative)
            fail("M002", MANIFEST, "has a version of something else than two numbers");
        version[i] = item.number;
    }
    if (version[0] != 1) fail("M002", MANIFEST, "has the major version %" PRIu64, version[0]);
    if (array.count != 4) fail("M001", MANIFEST, "is an array of %u", array.count);
    if (!next_item(&in, &digest) || digest.kind != BIN || !next_item(&in, &body) || body.kind != BIN || in.at != in.end)
        fail("M001", MANIFEST, "does not consist of a version, a digest and a body");
    if (length_of(digest.bytes) != 16 || !has_digest(body.bytes.at, length_of(body.bytes), digest.bytes.at))
        fail("M003", MANIFEST, "the body, bytes [%td, %td), has another digest", body.bytes.at - file.at,
             in.at - file.at);

    uint8_t shortest[64] = {0x94, 0xa5, 'z', 'c', 'k', 'p', 't', 0x92, 1}, *end = shortest + 9;
    if (version[1] < 0x80)
        *end++ = (uint8_t)version[1];
    else
        end = put_shortest(end, 0xcc, version[1]);
    end = put_shortest(end, 0xc4, 16);
    memcpy(end, digest.bytes.at, 16);
    end = put_shortest(end + 16, 0xc4, length_of(body.bytes));
    if (body.bytes.at - file.at != end - shortest || memcmp(file.at, shortest, (size_t)(end - shortest)))
        fail("M001", MANIFEST, "is not in msgpack's shortest form");
    return body.bytes;
}

/* ---- the body without its fields: step 9, which is points 1 to 3 and 9 of M005 ---- */

static void check_value(Bytes *in, int level, unsigned *containers, Keys *keys) {
    Item item;
    if (!next_item(in, &item)) fail("M005", MANIFEST, "the body is no msgpack");
    if (item.kind == STR && !is_utf8(item.bytes)) fail("M005", MANIFEST, "a string of the body is not UTF-8");
    if (item.kind != MAP && item.kind != ARRAY) return;
    if (level > MAX_NESTING) fail("M005", MANIFEST, "the body is nested too deep");
    if (++*containers > MAX_CONTAINERS) fail("M005", MANIFEST, "the body has more than 2^22 arrays and maps");
    size_t first_key = keys->count;
    for (uint32_t i = 0; i < item.count; i++) {
        if (item.kind == MAP) {
            Bytes key = *in;
            Item parsed;
            if (next_item(in, &parsed) && (parsed.kind == ARRAY || parsed.kind == MAP || parsed.kind == EXT))
                fail("M005", MANIFEST, "a key is an array, a map or an extension");
            *in = key;
            check_value(in, level + 1, containers, keys);
            key.end = in->at;
            push_key(keys, key);
        }
        check_value(in, level + 1, containers, keys);
    }
    if (pop_keys(keys, first_key, compare_packed_keys)) fail("M005", MANIFEST, "a map of the body has a key twice");
}

static void check_body(Bytes body) {
    Bytes in = body;
    Item item;
    if (!next_item(&in, &item) || item.kind != MAP) fail("M005", MANIFEST, "the body is no map");
    unsigned containers = 0;
    Keys keys = {0};
    in = body;
    check_value(&in, 0, &containers, &keys);
    if (in.at != in.end) fail("M005", MANIFEST, "bytes follow the body's map");
    free(keys.items);
}

/* ---- the fields. The body is msgpack without duplicate keys from here on, so next_item does not fail ---- */

static Item want(Bytes *in, Kind kind, const char *what) {
    Item item;
    if (!next_item(in, &item) || item.kind != kind)
        fail("M005", MANIFEST, "`%s` is, or holds, a value of a wrong type", what);
    return item;
}

/* Returns the value of a key of a packed map. Its `at` is NULL if there is no such key. */
static Bytes find(Bytes map, const char *key) {
    Item header, item;
    next_item(&map, &header);
    for (uint32_t i = 0; i < header.count; i++) {
        next_item(&map, &item);
        if (item.kind == STR && equals(item.bytes, key)) return map;
        skip_value(&map);
    }
    return (Bytes){NULL, NULL};
}

static Bytes field(Bytes map, const char *key) {
    Bytes value = find(map, key);
    if (!value.at) fail("M005", MANIFEST, "has no `%s`", key);
    return value;
}

/* Reads a uint. One that is not below `limit` breaks `rule`. */
static uint64_t want_number(Bytes *in, uint64_t limit, const char *rule, const char *what) {
    Item item = want(in, INTEGER, what);
    if (item.negative || item.number >= UINT_LIMIT) fail("M005", MANIFEST, "`%s` has a number that is no uint", what);
    if (item.number >= limit) fail(rule, MANIFEST, "`%s` has a number out of its range", what);
    return item.number;
}

static uint64_t number_field(Bytes map, const char *key, uint64_t limit) {
    Bytes value = field(map, key);
    return want_number(&value, limit, "M005", key);
}

/* Reads a column of `files` or `chunks`. The first column sets *count, which is the length of all others. */
static uint64_t *column(Bytes map, const char *key, bool first, size_t *count, uint64_t limit, const char *rule) {
    Bytes value = field(map, key);
    Item array = want(&value, ARRAY, key);
    if (first) *count = array.count;
    if (array.count != *count) fail("M005", MANIFEST, "`%s` is not as long as the other columns", key);
    uint64_t *numbers = allocate(*count, sizeof *numbers);
    for (size_t i = 0; i < *count; i++) numbers[i] = want_number(&value, limit, rule, key);
    return numbers;
}

/* Step 10. */
static void check_version(Bytes body, const uint64_t version[2]) {
    Bytes value = find(body, "version");
    Item item;
    bool same = value.at && next_item(&value, &item) && item.kind == ARRAY && item.count == 2;
    for (int i = 0; same && i < 2; i++)
        same = next_item(&value, &item) && item.kind == INTEGER && !item.negative && item.number == version[i];
    if (!same) fail("M001", MANIFEST, "`version` in the body is not the envelope's");
}

/* The features that the checkpoint requires. */
typedef struct {
    bool shared_files, box, pieces;
} Features;

/* Step 11. */
static Features check_features(Bytes body) {
    Bytes value = field(body, "requires");
    uint32_t count = want(&value, ARRAY, "requires").count;
    Features features = {false, false, false};
    /* The space before a name takes no more memory than the msgpack header of the name. */
    char *unknown = allocate(length_of(value) + 1, 1), *end = unknown;
    for (uint32_t i = 0; i < count; i++) {
        Bytes feature = want(&value, STR, "requires").bytes;
        bool shared_files = equals(feature, "shared-files"), box = equals(feature, "box");
        bool pieces = equals(feature, "pieces");
        features.shared_files |= shared_files;
        features.box |= box;
        features.pieces |= pieces;
        if (shared_files || box || pieces) continue;
        *end++ = ' ';
        memcpy(end, feature.at, length_of(feature));
        end += length_of(feature);
    }
    if (end != unknown) fail("M006", MANIFEST, "requires features that this reader does not know:%s", unknown);
    free(unknown);
    return features;
}

static int compare_names(const void *a, const void *b) {
    return compare_bytes(((const Name *)a)->text, ((const Name *)b)->text);
}

static void read_names(Checkpoint *c, Bytes body) {
    Bytes value = field(body, "names");
    c->name_count = want(&value, ARRAY, "names").count;
    if (c->name_count > 1 << 22) fail("M005", MANIFEST, "has %zu names", c->name_count);
    c->names = allocate(c->name_count, sizeof *c->names);
    c->sorted = allocate(c->name_count, sizeof *c->sorted);
    for (uint32_t i = 0; i < c->name_count; i++) {
        c->names[i] = want(&value, STR, "names").bytes;
        check_name(c->names[i], MANIFEST);
        c->sorted[i] = (Name){c->names[i], i};
    }
    qsort(c->sorted, c->name_count, sizeof *c->sorted, compare_names);
    for (size_t i = 1; i < c->name_count; i++)
        if (compare_names(&c->sorted[i - 1], &c->sorted[i]) == 0)
            fail("M007", MANIFEST, "has the name %.*s twice", (int)length_of(c->sorted[i].text),
                 (const char *)c->sorted[i].text.at);
}

static void read_shapes(Checkpoint *c, Bytes body) {
    Bytes value = field(body, "shapes");
    c->shape_count = want(&value, ARRAY, "shapes").count;
    c->shapes = allocate(c->shape_count, sizeof *c->shapes);
    for (size_t i = 0; i < c->shape_count; i++) {
        Shape *shape = &c->shapes[i];
        Item item;
        next_item(&value, &item);
        if (item.kind != ARRAY) fail("M008", MANIFEST, "shape %zu is no array", i);
        if (item.count > MAX_DIMENSIONS) fail("M008", MANIFEST, "shape %zu has %u dimensions", i, item.count);
        *shape = (Shape){value, item.count, {1, 1}};
        for (uint32_t j = 0; j < shape->dimensions; j++) {
            next_item(&value, &item);
            if (item.kind != INTEGER || item.negative || item.number >= UINT_LIMIT)
                fail("M008", MANIFEST, "shape %zu has a dimension that is no uint", i);
            if (!multiply(&shape->product, item.number))
                fail("M008", MANIFEST, "shape %zu has 2^62 elements or more", i);
        }
    }
}

static void read_grid(Bytes *value, Grid *grid) {
    Item dimensions, sections, numbers, number;
    next_item(value, &dimensions);
    if (dimensions.kind != ARRAY) fail("M015", MANIFEST, "a grid is no array");
    for (uint32_t i = 0; i < dimensions.count; i++) {
        next_item(value, &sections);
        if (sections.kind != ARRAY) fail("M015", MANIFEST, "a dimension of a grid is no array");
        add_dimension(grid);
        for (uint32_t j = 0; j < sections.count; j++) {
            next_item(value, &numbers);
            if (numbers.kind != ARRAY) fail("M015", MANIFEST, "a section of a grid is no array");
            add_section(grid);
            for (uint32_t k = 0; k < numbers.count; k++) {
                next_item(value, &number);
                if (number.kind != INTEGER || number.negative || number.number >= UINT_LIMIT)
                    fail("M015", MANIFEST, "a grid has a number that is no uint");
                add_number(grid, number.number);
            }
        }
        end_dimension(grid);
    }
    if (!grid_is_sound(grid)) fail("M015", MANIFEST, "a grid has an index twice or not at all, or divides nothing");
}

/* Without the feature `box`, there is only the grid that divides nothing. */
static void read_grids(Checkpoint *c, Bytes body, bool box) {
    Bytes value = {NULL, NULL};
    c->grid_count = 1;
    if (box) {
        value = field(body, "grids");
        c->grid_count = want(&value, ARRAY, "grids").count;
    }
    c->grids = allocate(c->grid_count + 1, sizeof *c->grids);
    for (size_t i = 0; box && i < c->grid_count; i++) {
        read_grid(&value, &c->grids[i]);
        if (c->grids[i].divided != (i > 0)) fail("M015", MANIFEST, "grid %zu is not allowed in its place", i);
    }
}

static void read_grid_ids(Checkpoint *c, Bytes map, Part *part) {
    Bytes value = find(map, "grids");
    if (!value.at) return;
    if (want(&value, ARRAY, "grids").count != part->count)
        fail("M010", MANIFEST, "`grids` of a part is not as long as its other columns");
    for (size_t i = 0; i < part->count; i++) {
        uint64_t sizes[MAX_DIMENSIONS];
        const Shape *shape = &c->shapes[part->shapes[i]];
        part->grids[i] = (uint32_t)want_number(&value, c->grid_count, "M015", "grids");
        get_dimensions(shape, sizes);
        if (!grid_fits(&c->grids[part->grids[i]], shape->dimensions, sizes, shape->product.elements))
            fail("M015", MANIFEST, "a tensor has a grid of another shape");
    }
}

static void read_part(Checkpoint *c, Bytes map, Part *part, bool box) {
    Bytes value = field(map, "name");
    part->name = want(&value, STR, "name").bytes;
    size_t size = length_of(part->name);
    if (size == 0 || size > 64) fail("N003", MANIFEST, "a part's name has %zu bytes", size);
    for (const uint8_t *p = part->name.at; p < part->name.end; p++)
        if (!((*p >= 'A' && *p <= 'Z') || (*p >= 'a' && *p <= 'z') || (*p >= '0' && *p <= '9') || *p == '_' ||
              (*p == '-' && p > part->name.at)))
            fail("N003", MANIFEST, "a part's name is %.*s", (int)size, (const char *)part->name.at);
    part->layout = number_field(map, "layout", (1 << 22) + 1);

    Bytes names = field(map, "names"), shapes = field(map, "shapes"), dtypes = field(map, "dtypes");
    part->count = want(&names, ARRAY, "names").count;
    if (want(&shapes, ARRAY, "shapes").count != part->count || want(&dtypes, ARRAY, "dtypes").count != part->count)
        fail("M010", MANIFEST, "the columns of part %.*s are not equally long", (int)size, (const char *)part->name.at);
    part->names = allocate(part->count, sizeof *part->names);
    part->shapes = allocate(part->count, sizeof *part->shapes);
    part->dtypes = allocate(part->count, sizeof *part->dtypes);
    part->grids = allocate(part->count, sizeof *part->grids);
    for (size_t i = 0; i < part->count; i++) {
        part->names[i] = (uint32_t)want_number(&names, c->name_count, "M010", "names");
        part->shapes[i] = (uint32_t)want_number(&shapes, c->shape_count, "M010", "shapes");
        if (i > 0 && part->names[i] <= part->names[i - 1]) fail("M010", MANIFEST, "name ids do not ascend");
        Bytes name = want(&dtypes, STR, "dtypes").bytes;
        int dtype = find_dtype(name);
        if (dtype < 0) fail("M009", MANIFEST, "has the dtype %.*s", (int)length_of(name), (const char *)name.at);
        part->dtypes[i] = (uint8_t)dtype;
        if (c->shapes[part->shapes[i]].product.padded > (UINT_LIMIT - 1) / DTYPES[dtype].bytes)
            fail("M008", MANIFEST, "a tensor has 2^62 bytes or more");
    }
    if (box) read_grid_ids(c, map, part);
}

static void read_parts(Checkpoint *c, Bytes body, bool box) {
    bool divided = false;
    Bytes value = field(body, "parts");
    c->part_count = want(&value, ARRAY, "parts").count;
    if (c->part_count > 256) fail("M005", MANIFEST, "has %zu parts", c->part_count);
    c->parts = allocate(c->part_count, sizeof *c->parts);
    for (size_t i = 0; i < c->part_count; i++) {
        Bytes map = value;
        want(&value, MAP, "parts");
        read_part(c, map, &c->parts[i], box);
        for (size_t j = 0; j < c->parts[i].count; j++) divided |= c->parts[i].grids[j] > 0;
        for (size_t j = 0; j < i; j++)
            if (compare_bytes(c->parts[i].name, c->parts[j].name) == 0)
                fail("M007", MANIFEST, "two parts have one name");
        value = map;
        skip_value(&value);
    }
    if (box && !divided) fail("M015", MANIFEST, "requires `box`, and no tensor has a grid");
}

static void read_aliases(Checkpoint *c, Bytes body) {
    Bytes value = c->aliases = field(body, "aliases");
    uint32_t count = want(&value, MAP, "aliases").count, id;
    if (count > 1 << 22) fail("M005", MANIFEST, "has %u aliases", count);
    for (uint32_t i = 0; i < count; i++) {
        Bytes alias = want(&value, STR, "aliases").bytes, name = want(&value, STR, "aliases").bytes;
        check_name(alias, MANIFEST);
        if (find_name(c, alias, &id)) fail("M012", MANIFEST, "an alias is a name");
        if (!find_name(c, name, &id)) fail("M012", MANIFEST, "an alias stands for something that is no name");
    }
}

static void read_files(Checkpoint *c, Bytes body) {
    Bytes map = field(body, "files"), in = map;
    want(&in, MAP, "files");
    size_t *n = &c->file_count;
    uint64_t *rank = column(map, "rank", true, n, c->world_size, "M011");
    uint64_t *part = column(map, "part", false, n, c->part_count, "M011");
    uint64_t *tier = column(map, "tier", false, n, 3, "M011");
    uint64_t *bytes = column(map, "bytes", false, n, UINT_LIMIT, "M005");
    uint64_t *data_start = column(map, "data_start", false, n, UINT_LIMIT, "S003");
    uint64_t *first_block = column(map, "first_block", false, n, UINT_LIMIT, "M005");
    c->files = allocate(*n, sizeof *c->files);
    Bytes save_id = {(uint8_t *)c->save_id, (uint8_t *)c->save_id + 16};
    for (size_t i = 0; i < *n; i++) {
        File *file = &c->files[i];
        *file = (File){.rank = (uint32_t)rank[i],
                       .part = (uint32_t)part[i],
                       .tier = (uint32_t)tier[i],
                       .bytes = bytes[i],
                       .data_start = data_start[i],
                       .first_block = first_block[i],
                       .save_id = save_id};
        if (file->data_start % 4096 || file->data_start < 4096 || file->data_start > file->bytes)
            fail("S003", MANIFEST, "file %zu has `data_start` %" PRIu64, i, file->data_start);
        if (i > 0 &&
            (rank[i] < rank[i - 1] ||
             (rank[i] == rank[i - 1] && (part[i] < part[i - 1] || (part[i] == part[i - 1] && tier[i] <= tier[i - 1])))))
            fail("M011", MANIFEST, "the files do not ascend by rank, part and tier");
    }
    free(rank), free(part), free(tier), free(bytes), free(data_start), free(first_block);
}

/* Checks M014. */
static void read_shared(Checkpoint *c, Bytes body) {
    Bytes value = field(body, "shared");
    uint32_t saves = want(&value, MAP, "shared").count;
    if (saves == 0) fail("M014", MANIFEST, "`shared` is empty");
    for (uint32_t i = 0; i < saves; i++) {
        Bytes save_id = want(&value, STR, "shared").bytes;
        if (!is_save_id(save_id)) fail("N004", MANIFEST, "`shared` has a key that is no save id");
        if (equals(save_id, c->save_id)) fail("M014", MANIFEST, "`shared` has the save id of the manifest");
        uint32_t count = want(&value, ARRAY, "shared").count;
        if (count == 0) fail("M014", MANIFEST, "`shared` has a save without files");
        uint64_t last = 0;
        for (uint32_t j = 0; j < count; j++) {
            uint64_t number = want_number(&value, c->file_count, "M014", "shared");
            if (j > 0 && number <= last) fail("M014", MANIFEST, "the numbers of shared files do not ascend");
            if (!equals(c->files[number].save_id, c->save_id)) fail("M014", MANIFEST, "a shared file has two saves");
            c->files[number].save_id = save_id;
            last = number;
        }
    }
}

static void read_digests(Checkpoint *c, Bytes body) {
    Bytes value = field(body, "digests");
    if (want(&value, ARRAY, "digests").count != c->world_size)
        fail("M005", MANIFEST, "`digests` is not as long as `world_size` says");
    uint8_t *digests = allocate(c->world_size, 16);
    c->digests = digests;
    for (uint64_t i = 0; i < c->world_size; i++, digests += 16) {
        Bytes digest = want(&value, BIN, "digests").bytes;
        if (length_of(digest) != 16) fail("M005", MANIFEST, "a digest of %zu bytes", length_of(digest));
        memcpy(digests, digest.at, 16);
    }
}

static void read_chunks(Checkpoint *c, Bytes body) {
    Bytes map = field(body, "chunks"), in = map;
    want(&in, MAP, "chunks");
    size_t *n = &c->chunk_count;
    uint64_t *layout = column(map, "layout", true, n, UINT_LIMIT, "M005");
    uint64_t *first_row = column(map, "first_row", false, n, UINT_LIMIT, "M005");
    uint64_t *rows = column(map, "rows", false, n, UINT_LIMIT, "M013");
    uint64_t *pieces = column(map, "pieces", false, n, UINT_LIMIT, "M005");
    uint64_t *offset = column(map, "offset", false, n, UINT_LIMIT, "M005");
    uint64_t *bytes = column(map, "bytes", false, n, 64 * MEBI + 1, "M013");
    Bytes digests = field(map, "digest");
    if (want(&digests, ARRAY, "digest").count != *n)
        fail("M005", MANIFEST, "`digest` is not as long as the other columns");
    c->chunks = allocate(*n, sizeof *c->chunks);
    for (size_t i = 0; i < *n; i++) {
        Bytes digest = want(&digests, BIN, "digest").bytes;
        if (length_of(digest) != 16) fail("M005", MANIFEST, "a digest of %zu bytes", length_of(digest));
        c->chunks[i] = (Chunk){layout[i], first_row[i], rows[i], pieces[i], offset[i], bytes[i], digest.at};
    }
    free(layout), free(first_row), free(rows), free(pieces), free(offset), free(bytes);
}

/* Checks M013. `many`: whether the checkpoint has the feature `pieces`. */
static void check_chunks(const Checkpoint *c, bool many) {
    uint64_t *next_row =
        allocate(c->part_count, sizeof *next_row); /* For each part, the row at which its next chunk begins. */
    uint64_t end = 0, chunks = 0, pieces = 0;
    const uint64_t most_chunks = many ? 1 << 16 : 4096, most_pieces = UINT64_C(1) << (many ? 32 : 26);
    for (size_t i = 0; i < c->chunk_count; i++) {
        const Chunk *chunk = &c->chunks[i];
        if (chunk->offset != end || chunk->bytes == 0)
            fail("M013", MANIFEST, "chunk %zu does not begin where the one before ends, or is empty", i);
        end += chunk->bytes;
        if (chunk->rows == 0) fail("M013", MANIFEST, "chunk %zu has no rows", i);
        uint64_t times = 0;
        for (size_t p = 0; p < c->part_count; p++) {
            if (c->parts[p].layout != chunk->layout) continue;
            times++;
            if (chunk->first_row != next_row[p] || chunk->rows > c->parts[p].count - next_row[p])
                fail("M013", MANIFEST,
                     "chunk %zu does not continue its layout, or has more rows than the part has names", i);
            next_row[p] += chunk->rows;
        }
        if (times == 0) fail("M013", MANIFEST, "chunk %zu is of a layout of no part", i);
        if (chunk->pieces > most_pieces) fail("M013", MANIFEST, "chunk %zu has too many pieces", i);
        chunks += times;
        pieces += times * chunk->pieces;
        if (chunks > most_chunks || pieces > most_pieces)
            fail("M013", MANIFEST, "there are too many chunks or pieces");
    }
    if (many && chunks <= 4096 && pieces <= UINT64_C(1) << 26)
        fail("M013", MANIFEST, "the feature `pieces` is not needed");
    if (many && pieces / 1024 + (pieces % 1024 != 0) > end)
        fail("M013", MANIFEST, "an index of %" PRIu64 " bytes has %" PRIu64 " pieces", end, pieces);
    if (end != c->index_bytes)
        fail("M013", MANIFEST, "the chunks end at %" PRIu64 ", and `index_bytes` is %" PRIu64, end, c->index_bytes);
    for (size_t p = 0; p < c->part_count; p++) {
        const Part *part = &c->parts[p];
        if (next_row[p] != part->count) fail("M013", MANIFEST, "the chunks have fewer rows than a part has names");
        for (size_t q = 0; q < p; q++) {
            if (c->parts[q].layout != part->layout) continue;
            if (c->parts[q].count != part->count ||
                memcmp(c->parts[q].names, part->names, part->count * sizeof *part->names))
                fail("M013", MANIFEST, "two parts of one layout have other names");
            break; /* Part q has been compared with the parts before it. */
        }
    }
    free(next_row);
}

static void read_writer(Bytes body) {
    Bytes value = field(body, "writer");
    uint32_t count = want(&value, MAP, "writer").count;
    for (uint32_t i = 0; i < 2 * count; i++) want(&value, STR, "writer");
}

void open_checkpoint(Checkpoint *c, const char *path) {
    *c = (Checkpoint){.data = -1, .index = -1};
    c->directory = find_directory(path);
    uint64_t size, version[2];
    int file = open_file(c->directory, MANIFEST, MANIFEST, &size);
    if (size > 256 * MEBI) fail("M004", MANIFEST, "has %" PRIu64 " bytes", size);
    uint8_t *content = allocate((size_t)size, 1); /* It is never freed: names point into it. */
    if (!read_at(file, 0, content, (size_t)size)) fail("M001", MANIFEST, "has become shorter");
    close(file);

    Bytes body = open_envelope((Bytes){content, content + size}, version);
    check_body(body);
    check_version(body, version);
    Features features = check_features(body);

    Bytes value = field(body, "save_id");
    Bytes save_id = want(&value, STR, "save_id").bytes;
    if (!is_save_id(save_id)) fail("N004", MANIFEST, "`save_id` is no save id");
    memcpy(c->save_id, save_id.at, 16);
    number_field(body, "step", UINT_LIMIT);
    c->world_size = number_field(body, "world_size", (1 << 20) + 1);
    c->block_bytes = number_field(body, "block_bytes", (1 << 26) + 1);
    if (c->world_size == 0) fail("M005", MANIFEST, "`world_size` is 0");
    if (c->block_bytes < 4096 || c->block_bytes % 4096)
        fail("M005", MANIFEST, "`block_bytes` is %" PRIu64, c->block_bytes);
    c->index_bytes = number_field(body, "index_bytes", UINT_LIMIT);
    value = field(body, "state");
    c->state = want(&value, BIN, "state").bytes;
    read_writer(body);
    read_names(c, body);
    read_shapes(c, body);
    read_grids(c, body, features.box);
    read_parts(c, body, features.box);
    read_aliases(c, body);
    read_digests(c, body);
    read_files(c, body);
    if (features.shared_files) read_shared(c, body);
    read_chunks(c, body);
    check_chunks(c, features.pieces);
}

/* ---- looking up ---- */

bool find_name(const Checkpoint *c, Bytes name, uint32_t *id) {
    Name wanted = {name, 0};
    const Name *found = bsearch(&wanted, c->sorted, c->name_count, sizeof *c->sorted, compare_names);
    if (found) *id = found->id;
    return found;
}

bool find_part(const Checkpoint *c, Bytes name, uint32_t *part) {
    for (*part = 0; *part < c->part_count; ++*part)
        if (compare_bytes(c->parts[*part].name, name) == 0) return true;
    return false;
}

static int compare_ids(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

bool find_row(const Part *part, uint32_t name, uint32_t *row) {
    const uint32_t *found = bsearch(&name, part->names, part->count, sizeof name, compare_ids);
    if (found) *row = (uint32_t)(found - part->names);
    return found;
}

bool find_alias(const Checkpoint *c, Bytes alias, Bytes *name) {
    Bytes in = c->aliases;
    Item header, key, value;
    next_item(&in, &header);
    for (uint32_t i = 0; i < header.count; i++) {
        next_item(&in, &key);
        next_item(&in, &value);
        if (compare_bytes(key.bytes, alias) == 0) {
            *name = value.bytes;
            return true;
        }
    }
    return false;
}

static int compare_files(const void *a, const void *b) {
    const File *x = a, *y = b;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    if (x->part != y->part) return x->part < y->part ? -1 : 1;
    return (x->tier > y->tier) - (x->tier < y->tier);
}

bool find_file(const Checkpoint *c, uint32_t rank, uint32_t part, uint32_t tier, size_t *file) {
    File wanted = {.rank = rank, .part = part, .tier = tier};
    const File *found = bsearch(&wanted, c->files, c->file_count, sizeof *c->files, compare_files);
    if (found) *file = (size_t)(found - c->files);
    return found;
}
