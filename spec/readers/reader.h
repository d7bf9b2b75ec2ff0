/* A reader and validator of zckpt checkpoints, written from ../format.md alone. This header declares what its source
   files share. The comments name sections and rules of ../format.md. */
#ifndef READER_H
#define READER_H
#define _POSIX_C_SOURCE 200809L
#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#define UINT_LIMIT (UINT64_C(1) << 62) /* Every uint of the format is below this number. */
#define MEBI (UINT64_C(1) << 20)
#define MAX_DIMENSIONS 64
#define PATH_ROOM 160 /* The longest path is data-<16 digits>/rank-<7 digits>/swap.<64 characters>.safetensors. */

/* A text, or the part of a file in memory that is still to be read. */
typedef struct {
    const uint8_t *at, *end;
} Bytes;

/* ---- base.c: errors, memory, text, digests, files ---- */

/* The stream that errors are written to. */
extern FILE *report;

/* Writes one line with the rule that is broken, the file and the details, and ends the program with status 1. If `rule`
   is NULL, the error is not about a rule, and the status is 2. */
_Noreturn void fail(const char *rule, const char *file, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Returns memory that is filled with zeros. Ends the program if there is none. */
void *allocate(size_t count, size_t size);
/* Returns an array of `count` items, moved if necessary, that has room for one more. */
void *grow(void *items, size_t count, size_t *room, size_t size);

size_t length_of(Bytes text);
int compare_bytes(Bytes a, Bytes b); /* Returns a number below, equal to or above 0, as strcmp does. */
bool equals(Bytes text, const char *expected);
bool is_utf8(Bytes text);
bool has_control_character(Bytes utf8); /* Looks for the control characters of N001. */
/* Reads a decimal number below 2^62 without leading zeros. */
bool read_decimal(Bytes *in, uint64_t *value);
void check_name(Bytes name, const char *file); /* Checks N001 and N002. */
bool is_save_id(Bytes text);                   /* Says whether the text obeys N004. */

bool has_digest(const void *data, size_t size, const uint8_t *digest);
/* These two check F001 and F002, and return a descriptor. `path` is the file's path in an error. */
int open_file(int parent, const char *name, const char *path, uint64_t *size);
int open_directory(int parent, const char *name, const char *path);
/* Says whether something has this name. A symbolic link that leads nowhere counts. */
bool exists_at(int parent, const char *name);
/* Returns false if the file ends before `size` bytes. */
bool read_at(int file, uint64_t offset, void *buffer, size_t size);

/* ---- msgpack.c ---- */

typedef enum { NIL, BOOLEAN, INTEGER, FLOAT, STR, BIN, ARRAY, MAP, EXT } Kind;

/* One msgpack value. For an array or a map, it is only the header. */
typedef struct {
    Kind kind;
    bool negative;   /* Whether an integer is below 0. Then `number` is in two's complement. */
    uint64_t number; /* The value of an integer or boolean, or the bits of a float as binary64. */
    uint32_t count;  /* The number of items of an array, or of pairs of a map. */
    int type;        /* The type of an extension. */
    Bytes bytes;     /* The content of a string, binary or extension. */
} Item;

/* The keys of all maps that are being read. The keys of the innermost map are at the end. */
typedef struct {
    Bytes *items;
    size_t count, room;
} Keys;

/* Reads one value, or the header of an array or map. Returns false if the bytes are not msgpack or end too early. */
bool next_item(Bytes *in, Item *item);
/* Reads one value with all values inside it. Returns false as next_item does. */
bool skip_value(Bytes *in);
void push_key(Keys *keys, Bytes key);
/* Removes the keys from number `first` on, and says whether two of them are equal. */
bool pop_keys(Keys *keys, size_t first, int (*compare)(const void *, const void *));
int compare_packed_keys(const void *a, const void *b);  /* Compares packed keys that have no items. */
int compare_decoded_keys(const void *a, const void *b); /* Compares keys byte by byte. */

/* ---- json.c ---- */

/* Checks S002. */
bool json_is_strict_object(Bytes text);
/* The functions below need a text that json_is_strict_object has accepted. Each moves `in` behind what it reads. */
/* Enters an object or array, or goes on to its next item. Returns false at the end of the object or array. */
bool json_next(Bytes *in);
/* Returns the first character of the next value, which tells its type. */
char json_kind(Bytes *in);
/* Decodes a string into *room, and moves *room behind it. A lone surrogate becomes three bytes that are not UTF-8. */
Bytes json_string(Bytes *in, uint8_t **room);
/* Decodes a key and reads the colon behind it. */
Bytes json_key(Bytes *in, uint8_t **room);
/* Reads a value of any type, and returns false if it is not a uint. */
bool json_uint(Bytes *in, uint64_t *value);
void json_skip(Bytes *in);

/* ---- manifest.c: sections 3 and 4 ---- */

typedef struct {
    const char *name;
    unsigned bytes;
} Dtype;
extern const Dtype DTYPES[];
int find_dtype(Bytes name); /* Returns -1 if there is no such dtype. */

/* The product of the dimensions of a shape. In `padded`, a dimension of 0 counts as 1 (M008). */
typedef struct {
    uint64_t elements, padded;
} Product;
/* Multiplies a product, which begins as {1, 1}. Returns false if it reaches 2^62. */
bool multiply(Product *product, uint64_t dimension);

typedef struct {
    Bytes packed; /* The dimensions in msgpack. */
    uint32_t dimensions;
    Product product;
} Shape;
void get_dimensions(const Shape *shape, uint64_t dimensions[MAX_DIMENSIONS]);

/* ---- grid.c ---- */

typedef struct {
    uint32_t dimension;
    uint64_t section; /* The number of its section in the dimension. */
    uint64_t first, count;
} Interval;

/* A grid. The caller fills it by the functions below, which begin with a grid of zeros. */
typedef struct {
    uint32_t dimensions;
    Interval *intervals; /* All intervals, as the grid lists them. */
    size_t count, room;
    uint64_t sections; /* The number of sections of the last dimension. */
    uint64_t boxes;    /* The number of boxes, or 0 until there is a dimension. */
    bool divided, half, empty, bad;
} Grid;
void add_dimension(Grid *g);
void add_section(Grid *g);
void add_number(Grid *g, uint64_t number);
void end_dimension(Grid *g);
bool grid_is_sound(const Grid *g); /* Says whether the grid obeys M015, whatever the shape is. */
bool grid_fits(const Grid *g, uint32_t dimensions, const uint64_t *sizes, uint64_t elements);
bool same_grid(const Grid *a, const Grid *b);
/* Returns the elements of a tensor in row-major order. Frees `tensor`, which has them in the order of the grid. */
uint8_t *in_row_major_order(const Grid *g, const Shape *shape, uint8_t *tensor, size_t size, unsigned element);

/* ---- manifest.c ---- */

typedef struct {
    Bytes text;
    uint32_t id;
} Name;

typedef struct {
    Bytes name;
    uint64_t layout;
    size_t count; /* The number of tensors, which is the number of rows of the layout. */
    uint32_t *names, *shapes, *grids;
    uint8_t *dtypes;
} Part;

/* A piece of the tensor in row `row` of part number `part`. It is in data file number `file`. */
typedef struct {
    size_t file;
    uint32_t part, row, copy, block;
    uint64_t start, stop, offset;
} Piece;

typedef struct {
    uint32_t rank, part, tier;
    uint64_t bytes, data_start, first_block;
    Bytes save_id;    /* The save id that the header of the data file contains. */
    uint64_t claimed; /* The number of bytes of its pieces that have been counted for I007. */
    Piece *pieces;    /* The pieces that the index places in the data file. Only validation collects them. */
    size_t piece_count, piece_room;
} File;

typedef struct {
    uint64_t layout, first_row, rows, pieces, offset, bytes;
    const uint8_t *digest;
} Chunk;

typedef struct {
    int directory, data, index; /* Descriptors. `data` and `index` are -1 until they are needed. */
    char save_id[17];
    uint64_t world_size, block_bytes, index_bytes;
    size_t name_count, shape_count, grid_count, part_count, file_count, chunk_count;
    Bytes *names;
    Name *sorted; /* The same names, sorted, with their ids. */
    Shape *shapes;
    Grid *grids; /* Number 0 divides nothing. */
    Part *parts;
    File *files;
    Chunk *chunks;
    Bytes aliases;          /* The map in msgpack. */
    const uint8_t *digests; /* 16 bytes for the digest table of each rank. */
    Bytes state;            /* The root tree. */
    uint8_t *table;         /* The digest table that was read last, or NULL. */
    uint32_t table_rank;
    uint64_t table_blocks; /* The number of digests in that table. */
} Checkpoint;

/* Finds the checkpoint, reads its manifest, and checks all rules that are checked at open. */
void open_checkpoint(Checkpoint *c, const char *path);
bool find_name(const Checkpoint *c, Bytes name, uint32_t *id);
bool find_part(const Checkpoint *c, Bytes name, uint32_t *part);
bool find_row(const Part *part, uint32_t name, uint32_t *row);
bool find_alias(const Checkpoint *c, Bytes alias, Bytes *name);
bool find_file(const Checkpoint *c, uint32_t rank, uint32_t part, uint32_t tier, size_t *file);
static inline const Shape *shape_of(const Checkpoint *c, uint32_t part, uint32_t row) {
    return &c->shapes[c->parts[part].shapes[row]];
}
static inline const Grid *grid_of(const Checkpoint *c, uint32_t part, uint32_t row) {
    return &c->grids[c->parts[part].grids[row]];
}
static inline unsigned element_bytes(const Checkpoint *c, uint32_t part, uint32_t row) {
    return DTYPES[c->parts[part].dtypes[row]].bytes;
}

/* ---- index.c: section 5 ---- */

typedef void Visit(Checkpoint *c, const Piece *piece, void *context);
/* Reads one chunk, checks F001, F002 and I002 to I006, and calls `visit` for each piece of each part. */
void read_chunk(Checkpoint *c, const Chunk *chunk, Visit *visit, void *context);
void check_index_length(Checkpoint *c); /* Checks I001. */
/* Both count the bytes of a piece and check I007. The second one also keeps the piece for check_data_file. */
void claim(Checkpoint *c, const Piece *piece, void *unused);
void claim_and_keep(Checkpoint *c, const Piece *piece, void *unused);

/* ---- files.c: sections 7 and 10 ---- */

void path_of_file(const Checkpoint *c, const File *file, char path[PATH_ROOM]);
/* Checks F001 to F003 and returns a descriptor. */
int open_data_file(Checkpoint *c, const File *file);
/* Reads the digest table of a rank into `c`. Checks D001, as far as a loader does, and D002. */
void read_table(Checkpoint *c, uint32_t rank);
/* Compares the digest of block number `block` of the data file, which begins at byte `begin` of it: D001 and D003. */
void check_block(Checkpoint *c, const File *file, uint64_t block, const void *data, uint64_t begin, size_t size);
/* Returns the elements of one copy of a tensor, which the caller frees, or NULL if there is no such copy. */
uint8_t *load_tensor(Checkpoint *c, uint32_t part, uint32_t row, uint32_t copy, uint64_t *size);

/* ---- header.c: section 6 ---- */

/* Checks S001 to S008, N001, N002 and D003 for one data file. Returns its number of blocks. */
uint64_t check_data_file(Checkpoint *c, File *file);

/* ---- tree.c: section 8 ---- */

/* Checks T001 to T004. `where` names the tree in an error. */
void check_tree(const Checkpoint *c, Bytes tree, const char *where);
/* Returns the tree of a rank, checked and still packed, or NULL if the rank has none. The caller frees it. */
uint8_t *load_rank_tree(Checkpoint *c, uint64_t rank, uint64_t *size);

#endif
