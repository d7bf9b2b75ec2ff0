/* Section 6 of the format: the header of a data file is compared with the index, and its blocks with their digests. */
#include "reader.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    Bytes key;   /* The name of the entry. */
    Bytes name;  /* The name of the tensor. */
    Bytes shape; /* The header text from the shape on. */
    int dtype;
    bool filler, partial, used;
    uint64_t start, stop; /* The elements of a partial piece. */
    uint64_t begin, end;  /* The bytes of the entry in the data. */
    uint64_t elements;    /* The number of elements of its shape. */
    uint64_t block;       /* The number of its first block. */
} Entry;

typedef struct {
    Bytes name;
    Bytes json;
    Grid grid; /* The grid of `zckpt.grids`, or one that divides nothing. */
} WholeShape;

/* The data file that is being checked, and what has been read of its header. */
typedef struct {
    Checkpoint *c;
    const File *file;
    char path[PATH_ROOM];
    Bytes text;
    uint8_t *room; /* Memory for decoded strings. */
    WholeShape *shapes;
    size_t shape_count, shape_room;
    Entry *entries;
    size_t entry_count, entry_room;
} Header;

static bool read_shape(Bytes *in, uint64_t dimensions[MAX_DIMENSIONS], uint32_t *count, Product *product) {
    *count = 0;
    *product = (Product){1, 1};
    bool good = json_kind(in) == '[';
    if (!good)
        json_skip(in);
    else
        while (json_next(in)) {
            uint64_t dimension;
            if (!json_uint(in, &dimension) || *count == MAX_DIMENSIONS || !multiply(product, dimension))
                good = false;
            else
                dimensions[(*count)++] = dimension;
        }
    return good;
}

/* ---- `__metadata__`: S006 ---- */

static int compare_whole_shapes(const void *a, const void *b) {
    return compare_bytes(((const WholeShape *)a)->name, ((const WholeShape *)b)->name);
}

static const WholeShape *find_whole_shape(const Header *h, Bytes name) {
    WholeShape wanted = {.name = name};
    return h->shape_count ? bsearch(&wanted, h->shapes, h->shape_count, sizeof wanted, compare_whole_shapes) : NULL;
}

/* Reads the text of `zckpt.shapes`. */
static void read_whole_shapes(Header *h, Bytes json) {
    if (!json_is_strict_object(json))
        fail("S002", h->path, "`zckpt.shapes` is not one JSON object, or has a key twice");
    while (json_next(&json)) {
        uint64_t dimensions[MAX_DIMENSIONS];
        uint32_t count;
        Product product;
        WholeShape shape = {.name = json_key(&json, &h->room)};
        shape.json = json;
        check_name(shape.name, h->path);
        if (!read_shape(&json, dimensions, &count, &product))
            fail("S006", h->path, "`zckpt.shapes` has something that is no shape");
        h->shapes = grow(h->shapes, h->shape_count, &h->shape_room, sizeof shape);
        h->shapes[h->shape_count++] = shape;
    }
    if (h->shape_count) qsort(h->shapes, h->shape_count, sizeof *h->shapes, compare_whole_shapes);
}

/* Reads a grid in JSON. Returns false if it is not one. */
static bool read_grid(Bytes *json, Grid *grid) {
    bool good = json_kind(json) == '[';
    if (!good) json_skip(json);
    while (good && json_next(json)) {
        if (json_kind(json) != '[') return false;
        add_dimension(grid);
        while (json_next(json)) {
            if (json_kind(json) != '[') return false;
            add_section(grid);
            while (json_next(json)) {
                uint64_t number;
                if (!json_uint(json, &number)) return false;
                add_number(grid, number);
            }
        }
        end_dimension(grid);
    }
    return good && grid->divided && grid_is_sound(grid);
}

/* Reads the text of `zckpt.grids`. */
static void read_grids(Header *h, Bytes json) {
    if (!json_is_strict_object(json))
        fail("S002", h->path, "`zckpt.grids` is not one JSON object, or has a key twice");
    while (json_next(&json)) {
        WholeShape *whole = (WholeShape *)find_whole_shape(h, json_key(&json, &h->room));
        if (!whole || !read_grid(&json, &whole->grid)) fail("S006", h->path, "`zckpt.grids` has something wrong");
        uint64_t sizes[MAX_DIMENSIONS];
        uint32_t count;
        Product product;
        Bytes shape = whole->json;
        read_shape(&shape, sizes, &count, &product);
        if (!grid_fits(&whole->grid, count, sizes, product.elements))
            fail("S006", h->path, "`zckpt.grids` has a grid that does not fit the shape of its tensor");
    }
}

static void check_metadata(Header *h, Bytes json) {
    static const char *const tiers[] = {"device", "host", "nvme"};
    const Checkpoint *c = h->c;
    char part[65], rank[16], world_size[16], save_id[17];
    snprintf(part, sizeof part, "%.*s", (int)length_of(c->parts[h->file->part].name),
             (const char *)c->parts[h->file->part].name.at);
    snprintf(save_id, sizeof save_id, "%.16s", (const char *)h->file->save_id.at);
    snprintf(rank, sizeof rank, "%u", h->file->rank);
    snprintf(world_size, sizeof world_size, "%" PRIu64, c->world_size);
    const struct {
        const char *key, *value;
    } expected[] = {{"zckpt.save_id", save_id},
                    {"zckpt.part", part},
                    {"zckpt.rank", rank},
                    {"zckpt.world_size", world_size},
                    {"zckpt.tier", tiers[h->file->tier]}};
    unsigned found = 0;
    Bytes shapes = {NULL, NULL}, grids = {NULL, NULL};
    if (json_kind(&json) != '{') fail("S006", h->path, "`__metadata__` is no object");
    while (json_next(&json)) {
        Bytes key = json_key(&json, &h->room);
        if (json_kind(&json) != '"') fail("S006", h->path, "a value of `__metadata__` is no string");
        Bytes value = json_string(&json, &h->room);
        for (unsigned i = 0; i < sizeof expected / sizeof *expected; i++) {
            if (!equals(key, expected[i].key)) continue;
            if (!equals(value, expected[i].value))
                fail("S006", h->path, "`%s` is not \"%s\"", expected[i].key, expected[i].value);
            found++;
        }
        if (equals(key, "zckpt.version")) {
            if (!length_of(value) || *value.at != '1' || (length_of(value) > 1 && value.at[1] != '.'))
                fail("S006", h->path, "`zckpt.version` is not 1");
            found++;
        }
        if (equals(key, "zckpt.shapes")) shapes = value;
        if (equals(key, "zckpt.grids")) grids = value;
    }
    if (found != sizeof expected / sizeof *expected + 1 || !shapes.at)
        fail("S006", h->path, "`__metadata__` has not all keys");
    read_whole_shapes(h, shapes);
    if (grids.at) read_grids(h, grids);
}

/* ---- entries: S004, S008 ---- */

/* Splits the name of a partial piece, `<tensor name>@<start>:<stop>`. */
static void split_name(const Header *h, Entry *entry) {
    entry->name = entry->key;
    const uint8_t *p = entry->key.end;
    int colons = 0;
    while (p > entry->key.at && ((p[-1] >= '0' && p[-1] <= '9') || (p[-1] == ':' && !colons++))) p--;
    if (p <= entry->key.at || p[-1] != '@') return;
    Bytes range = {p, entry->key.end};
    if (!memchr(range.at, ':', length_of(range)) || *range.at == ':' || range.end[-1] == ':') return;
    entry->name.end = p - 1;
    entry->partial = true;
    if (!read_decimal(&range, &entry->start) || *range.at++ != ':' || !read_decimal(&range, &entry->stop))
        fail("S004", h->path, "the name of an entry has a range with leading zeros or too many digits");
}

static void read_entry(Header *h, Bytes key, Bytes *in) {
    Entry entry = {.key = key, .dtype = -1};
    uint64_t dimensions[MAX_DIMENSIONS], offsets[2] = {0, 0};
    uint32_t count = 0;
    Product product;
    bool good = true, has_offsets = false;
    if (json_kind(in) != '{') fail("S004", h->path, "an entry is no object");
    while (json_next(in)) {
        Bytes field = json_key(in, &h->room);
        if (equals(field, "dtype") && json_kind(in) == '"') {
            entry.dtype = find_dtype(json_string(in, &h->room));
        } else if (equals(field, "shape")) {
            entry.shape = *in;
            good &= read_shape(in, dimensions, &count, &product);
        } else if (equals(field, "data_offsets") && json_kind(in) == '[') {
            int n = 0;
            for (; json_next(in); n++) {
                uint64_t offset;
                good &= json_uint(in, &offset) && n < 2;
                if (good) offsets[n] = offset;
            }
            has_offsets = n == 2;
        } else {
            fail("S004", h->path, "an entry has an unknown key, or a value of a wrong type");
        }
    }
    if (!good || entry.dtype < 0 || !entry.shape.at || !has_offsets)
        fail("S004", h->path, "an entry has no valid dtype, shape or offsets");
    unsigned size = DTYPES[entry.dtype].bytes;
    entry.begin = offsets[0];
    entry.end = offsets[1];
    entry.elements = product.elements;
    if (product.padded > (UINT_LIMIT - 1) / size || entry.end < entry.begin ||
        entry.end - entry.begin != entry.elements * size)
        fail("S004", h->path, "the offsets of an entry do not fit its shape");
    entry.filler = length_of(key) && *key.at == '@';
    if (entry.filler) {
        if (strcmp(DTYPES[entry.dtype].name, "U8") || count != 1 || entry.elements >= 4096)
            fail("S008", h->path, "a filler is not U8, one-dimensional and shorter than 4096 bytes");
    } else {
        split_name(h, &entry);
        check_name(entry.name, h->path);
        if (entry.begin % size) fail("S004", h->path, "a piece does not begin at a multiple of its element");
    }
    if (entry.partial) {
        const WholeShape *whole = find_whole_shape(h, entry.name);
        if (!whole) fail("S006", h->path, "`zckpt.shapes` lacks the tensor of a partial piece");
        Bytes json = whole->json;
        uint64_t unused[MAX_DIMENSIONS];
        uint32_t dimensions_of_whole;
        Product all;
        read_shape(&json, unused, &dimensions_of_whole, &all);
        if (entry.start >= entry.stop || entry.stop > all.elements || count != 1 ||
            entry.elements != entry.stop - entry.start)
            fail("S004", h->path,
                 "the shape of a partial piece does not fit its range, or its range does not fit its tensor");
    }
    h->entries = grow(h->entries, h->entry_count, &h->entry_room, sizeof entry);
    h->entries[h->entry_count++] = entry;
}

static int compare_places(const void *a, const void *b) {
    const Entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static int compare_entry_keys(const void *a, const void *b) {
    return compare_bytes(((const Entry *)a)->key, ((const Entry *)b)->key);
}

/* Checks S005 and numbers the blocks. Returns the number of blocks of the data file. */
static uint64_t tile(Header *h) {
    uint64_t size = h->c->block_bytes, end = 0, block = (h->file->data_start + size - 1) / size;
    if (h->entry_count) qsort(h->entries, h->entry_count, sizeof *h->entries, compare_places);
    for (size_t i = 0; i < h->entry_count; i++) {
        Entry *entry = &h->entries[i];
        if (entry->begin != end)
            fail("S005", h->path, "the entries leave a gap or overlap at byte %" PRIu64 " of the data", end);
        end = entry->end;
        entry->block = block;
        block += (end - entry->begin + size - 1) / size;
    }
    if (end != h->file->bytes - h->file->data_start) fail("S005", h->path, "the entries do not end with the file");
    return block;
}

/* ---- S007 ---- */

static bool same_shape(Bytes json, const Shape *shape) {
    uint64_t here[MAX_DIMENSIONS], there[MAX_DIMENSIONS];
    uint32_t count;
    Product product;
    get_dimensions(shape, there);
    return read_shape(&json, here, &count, &product) && count == shape->dimensions &&
           memcmp(here, there, count * sizeof *here) == 0;
}

static void match_pieces(Header *h) {
    const Checkpoint *c = h->c;
    size_t fillers = 0;
    for (size_t i = 0; i < h->entry_count; i++) fillers += h->entries[i].filler;
    if (h->entry_count) qsort(h->entries, h->entry_count, sizeof *h->entries, compare_entry_keys);
    if (h->entry_count - fillers != h->file->piece_count)
        fail("S007", h->path, "%zu entries are pieces, and the index has %zu", h->entry_count - fillers,
             h->file->piece_count);
    for (size_t i = 0; i < h->file->piece_count; i++) {
        const Piece *piece = &h->file->pieces[i];
        const Shape *shape = shape_of(c, piece->part, piece->row);
        Bytes name = c->names[c->parts[piece->part].names[piece->row]];
        const Grid *grid = grid_of(c, piece->part, piece->row);
        bool whole = piece->stop - piece->start == shape->product.elements && !grid->divided;
        char key[1024 + 48];
        int size = snprintf(key, sizeof key, "%.*s", (int)length_of(name), (const char *)name.at);
        if (!whole)
            size += snprintf(key + size, sizeof key - (size_t)size, "@%" PRIu64 ":%" PRIu64, piece->start, piece->stop);
        Entry wanted = {.key = {(uint8_t *)key, (uint8_t *)key + size}};
        Entry *entry =
            h->entry_count ? bsearch(&wanted, h->entries, h->entry_count, sizeof wanted, compare_entry_keys) : NULL;
        if (!entry || entry->used) fail("S007", h->path, "the piece %s of the index is no entry, or is one twice", key);
        entry->used = true;
        if (entry->begin != piece->offset || entry->block != piece->block ||
            entry->dtype != c->parts[piece->part].dtypes[piece->row])
            fail("S007", h->path, "%s has another offset, block or dtype in the index", key);
        if (!same_shape(whole ? entry->shape : find_whole_shape(h, name)->json, shape))
            fail("S007", h->path, "%s has another shape in the manifest", key);
        const WholeShape *in_header = find_whole_shape(h, name);
        if (whole ? in_header && in_header->grid.divided : !same_grid(&in_header->grid, grid))
            fail("S007", h->path, "%s has another grid in the manifest", key);
    }
}

/* ---- blocks: D003, and the zeros of S008 ---- */

static void check_header_blocks(Checkpoint *c, const File *file, const uint8_t *header) {
    uint64_t block = 0;
    for (uint64_t begin = 0; begin < file->data_start; begin += c->block_bytes) {
        uint64_t left = file->data_start - begin;
        check_block(c, file, block++, header + begin, begin, left < c->block_bytes ? left : c->block_bytes);
    }
}

static void check_data(Header *h, int opened) {
    uint64_t size = h->c->block_bytes;
    uint8_t *data = allocate(size, 1);
    for (size_t i = 0; i < h->entry_count; i++) {
        const Entry *entry = &h->entries[i];
        uint64_t block = entry->block;
        for (uint64_t done = entry->begin; done < entry->end; done += size) {
            size_t n = entry->end - done < size ? entry->end - done : size;
            uint64_t begin = h->file->data_start + done;
            if (!read_at(opened, begin, data, n)) fail("F003", h->path, "has become shorter");
            check_block(h->c, h->file, block++, data, begin, n);
            for (size_t j = 0; entry->filler && j < n; j++)
                if (data[j]) fail("S008", h->path, "a filler is not zero at byte %" PRIu64, (begin + j));
        }
    }
    free(data);
}

uint64_t check_data_file(Checkpoint *c, File *file) {
    Header h = {.c = c, .file = file};
    path_of_file(c, file, h.path);
    int opened = open_data_file(c, file);
    uint8_t size[8] = {0};
    uint64_t n = 0;
    if (file->bytes < 8 || !read_at(opened, 0, size, 8)) fail("S001", h.path, "is shorter than 8 bytes");
    for (int i = 7; i >= 0; i--) n = n << 8 | size[i];
    if (n > 100000000) fail("S001", h.path, "announces a header of %" PRIu64 " bytes", n);
    if (8 + n != file->data_start) fail("S003", h.path, "its data begins at %" PRIu64, (8 + n));
    uint8_t *header = allocate(file->data_start, 1), *decoded = allocate(2 * n, 1);
    if (!read_at(opened, 0, header, file->data_start)) fail("F003", h.path, "has become shorter");
    check_header_blocks(c, file, header);

    h.text = (Bytes){header + 8, header + 8 + n};
    h.room = decoded;
    if (!json_is_strict_object(h.text)) fail("S002", h.path, "the header is not one JSON object, or has a key twice");
    Bytes in = h.text, metadata = {NULL, NULL};
    while (json_next(&in)) {
        uint8_t *room = h.room;
        if (equals(json_key(&in, &room), "__metadata__")) metadata = in;
        json_skip(&in);
    }
    if (!metadata.at) fail("S006", h.path, "has no `__metadata__`");
    check_metadata(&h, metadata);
    in = h.text;
    while (json_next(&in)) {
        Bytes key = json_key(&in, &h.room);
        if (equals(key, "__metadata__"))
            json_skip(&in);
        else
            read_entry(&h, key, &in);
    }
    uint64_t blocks = tile(&h);
    check_data(&h, opened);
    match_pieces(&h);
    close(opened);
    for (size_t i = 0; i < h.shape_count; i++) free(h.shapes[i].grid.intervals);
    free(header), free(decoded), free(h.entries), free(h.shapes), free(file->pieces);
    file->pieces = NULL;
    return blocks;
}
