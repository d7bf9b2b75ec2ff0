/* Section 5 of the format: the index. */
#include "reader.h"

#include <stdlib.h>
#include <unistd.h>
#include <zstd.h>

#define INDEX "index.bin"
#define MAX_CONTENT (64 * MEBI)

static uint64_t little_endian(const uint8_t *at, size_t size) {
    uint64_t value = 0;
    while (size--) value = value << 8 | at[size];
    return value;
}

/* Opens the index and returns its length. */
static uint64_t open_index(Checkpoint *c) {
    uint64_t size;
    char path[PATH_ROOM];
    snprintf(path, sizeof path, "data-%s", c->save_id);
    if (c->data < 0) c->data = open_directory(c->directory, path, path);
    if (c->index >= 0) close(c->index);
    snprintf(path, sizeof path, "data-%s/" INDEX, c->save_id);
    c->index = open_file(c->data, INDEX, path, &size);
    return size;
}

void check_index_length(Checkpoint *c) {
    uint64_t size = open_index(c);
    if (size != c->index_bytes) fail("I001", INDEX, "has %" PRIu64 " bytes, not %" PRIu64, size, c->index_bytes);
}

/* Reads a chunk, checks I002 and I003, and returns its decompressed columns. */
static uint8_t *decompress(Checkpoint *c, const Chunk *chunk) {
    if (c->index < 0) open_index(c);
    uint64_t begin = chunk->offset, end = begin + chunk->bytes, size;
    uint8_t *frame = allocate(chunk->bytes, 1);
    if (!read_at(c->index, begin, frame, chunk->bytes) || !has_digest(frame, chunk->bytes, chunk->digest))
        fail("I002", INDEX, "bytes [%" PRIu64 ", %" PRIu64 ") are missing or have another digest", begin, end);

    if (chunk->rows > MAX_CONTENT / 8 || 8 * chunk->rows + 25 * chunk->pieces > MAX_CONTENT)
        fail("I003", INDEX, "the chunk at %" PRIu64 " is larger than 64 MiB", begin);
    size = 8 * chunk->rows + 25 * chunk->pieces;
    if (chunk->bytes < 6 || little_endian(frame, 4) != 0xfd2fb528 ||
        ZSTD_getFrameContentSize(frame, chunk->bytes) != size ||
        ZSTD_findFrameCompressedSize(frame, chunk->bytes) != chunk->bytes)
        fail("I003", INDEX, "bytes [%" PRIu64 ", %" PRIu64 ") are not one zstd frame that declares %" PRIu64 " bytes",
             begin, end, size);
    /* RFC 8878, 3.1.1.1: the window of a single segment is as large as the content. Otherwise byte 5 gives its size. */
    bool single_segment = frame[4] & 0x20;
    uint64_t window = UINT64_C(1) << (10 + (frame[5] >> 3));
    if (!single_segment && window + window / 8 * (frame[5] & 7) > 64 * MEBI)
        fail("I003", INDEX, "the chunk at %" PRIu64 " needs a window above 64 MiB", begin);
    if (ZSTD_getDictID_fromFrame(frame, chunk->bytes))
        fail("I003", INDEX, "the chunk at %" PRIu64 " needs a dictionary", begin);
    uint8_t *content = allocate(size, 1);
    if (ZSTD_decompress(content, size, frame, chunk->bytes) != size)
        fail("I003", INDEX, "bytes [%" PRIu64 ", %" PRIu64 ") do not decompress", begin, end);
    free(frame);
    return content;
}

typedef struct {
    const uint8_t *names, *counts, *ranks, *tiers, *lengths, *offsets, *blocks;
} Columns;

/* Sets the data file, the block and the offset of piece number `i` of the chunk. Checks I006. */
static void place(const Checkpoint *c, const Columns *columns, uint64_t i, unsigned size, Piece *piece) {
    if (!find_file(c, (uint32_t)little_endian(columns->ranks + 4 * i, 4), piece->part, columns->tiers[i], &piece->file))
        fail("I006", INDEX, "a piece is in a file that is not listed");
    piece->block = (uint32_t)little_endian(columns->blocks + 4 * i, 4);
    piece->offset = little_endian(columns->offsets + 8 * i, 8);
    uint64_t data = c->files[piece->file].bytes - c->files[piece->file].data_start;
    if (piece->offset % size || piece->offset > data || (piece->stop - piece->start) * size > data - piece->offset)
        fail("I006", INDEX, "a piece at %" PRIu64 " is not in the data, or not at a multiple of its element size",
             piece->offset);
}

/* Computes the pieces of all rows of a chunk for one part, and checks I005. With `visit`, it also checks I006 and calls
   `visit` for each piece. */
static void walk(Checkpoint *c, const Chunk *chunk, const Columns *columns, uint32_t p, Visit *visit, void *context) {
    uint64_t i = 0; /* The number of the piece in the chunk. */
    for (uint64_t row = 0; row < chunk->rows; row++) {
        Piece piece = {.part = p, .row = (uint32_t)(chunk->first_row + row)};
        uint64_t n = shape_of(c, p, piece.row)->product.elements, left = UINT_LIMIT - 1, start = 0, copy = 0;
        for (uint64_t end = i + little_endian(columns->counts + 4 * row, 4); i < end; i++) {
            uint64_t length = little_endian(columns->lengths + 8 * i, 8);
            if (copy >= c->world_size) fail("I005", INDEX, "a tensor has more copies than there are ranks");
            if (n > 0 ? length < 1 || length > n - start : length > 0)
                fail("I005", INDEX, "a piece has %" PRIu64 " elements, from element %" PRIu64 " of %" PRIu64 " on",
                     length, start, n);
            if (length > left) fail("I005", INDEX, "the pieces of a tensor have 2^62 elements or more");
            left -= length;
            piece.copy = (uint32_t)copy;
            piece.start = start;
            piece.stop = start + length;
            if (visit) {
                place(c, columns, i, element_bytes(c, p, piece.row), &piece);
                visit(c, &piece, context);
            }
            start = piece.stop < n ? piece.stop : 0;
            copy += start == 0;
        }
        if (start != 0) fail("I005", INDEX, "the last copy of a tensor has a gap");
    }
}

void read_chunk(Checkpoint *c, const Chunk *chunk, Visit *visit, void *context) {
    uint8_t *content = decompress(c, chunk);
    uint64_t rows = chunk->rows, pieces = chunk->pieces, sum = 0;
    Columns columns = {.names = content};
    columns.counts = columns.names + 4 * rows;
    columns.ranks = columns.counts + 4 * rows;
    columns.tiers = columns.ranks + 4 * pieces;
    columns.lengths = columns.tiers + pieces;
    columns.offsets = columns.lengths + 8 * pieces;
    columns.blocks = columns.offsets + 8 * pieces;
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t count = little_endian(columns.counts + 4 * row, 4);
        if (count == 0) fail("I004", INDEX, "a row has no piece");
        sum += count;
    }
    if (sum != pieces) fail("I004", INDEX, "the rows have %" PRIu64 " pieces, not %" PRIu64, sum, pieces);
    for (uint32_t p = 0; p < c->part_count; p++) {
        if (c->parts[p].layout != chunk->layout) continue;
        for (uint64_t row = 0; row < rows; row++)
            if (little_endian(columns.names + 4 * row, 4) != c->parts[p].names[chunk->first_row + row])
                fail("I004", INDEX, "a row is of another name");
        walk(c, chunk, &columns, p, NULL, NULL); /* I005 is checked for all rows before I006. */
        walk(c, chunk, &columns, p, visit, context);
    }
    free(content);
}

void claim(Checkpoint *c, const Piece *piece, void *unused) {
    (void)unused;
    File *file = &c->files[piece->file];
    uint64_t bytes = (piece->stop - piece->start) * element_bytes(c, piece->part, piece->row);
    if (bytes > file->bytes - file->data_start - file->claimed) {
        char path[PATH_ROOM];
        path_of_file(c, file, path);
        fail("I007", path, "the pieces in it have more bytes than its data");
    }
    file->claimed += bytes;
}

void claim_and_keep(Checkpoint *c, const Piece *piece, void *unused) {
    claim(c, piece, unused);
    File *file = &c->files[piece->file];
    if (file->piece_count > file->data_start / 32) { /* An entry takes more than 32 bytes of a header. */
        char path[PATH_ROOM];
        path_of_file(c, file, path);
        fail("S007", path, "the index places more pieces in it than its header can have entries");
    }
    file->pieces = grow(file->pieces, file->piece_count, &file->piece_room, sizeof *file->pieces);
    file->pieces[file->piece_count++] = *piece;
}
