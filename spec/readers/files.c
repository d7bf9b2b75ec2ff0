/* Sections 7 and 10 of the format: digest tables, and how a tensor is read. */
#include "reader.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int open_rank(Checkpoint *c, uint32_t rank) {
    char name[32], path[PATH_ROOM];
    snprintf(path, sizeof path, "data-%s", c->save_id);
    if (c->data < 0) c->data = open_directory(c->directory, path, path);
    snprintf(name, sizeof name, "rank-%05u", rank);
    snprintf(path, sizeof path, "data-%s/%s", c->save_id, name);
    return open_directory(c->data, name, path);
}

void path_of_file(const Checkpoint *c, const File *file, char path[PATH_ROOM]) {
    static const char *const prefixes[] = {"", "host.", "swap."};
    Bytes part = c->parts[file->part].name;
    snprintf(path, PATH_ROOM, "data-%s/rank-%05u/%s%.*s.safetensors", c->save_id, file->rank, prefixes[file->tier],
             (int)length_of(part), (const char *)part.at);
}

int open_data_file(Checkpoint *c, const File *file) {
    char path[PATH_ROOM];
    uint64_t size;
    path_of_file(c, file, path);
    int rank = open_rank(c, file->rank), opened = open_file(rank, strrchr(path, '/') + 1, path, &size);
    close(rank);
    if (size != file->bytes) fail("F003", path, "has %" PRIu64 " bytes, not %" PRIu64, size, file->bytes);
    return opened;
}

void read_table(Checkpoint *c, uint32_t rank) {
    if (c->table && c->table_rank == rank) return;
    free(c->table);
    char path[PATH_ROOM];
    uint64_t size;
    int directory = open_rank(c, rank);
    snprintf(path, sizeof path, "data-%s/rank-%05u/digests.bin", c->save_id, rank);
    int file = open_file(directory, "digests.bin", path, &size);
    if (size > 1024 * MEBI || size % 16) fail("D001", path, "has %" PRIu64 " bytes", size);
    c->table = allocate(size, 1);
    if (!read_at(file, 0, c->table, size) || !has_digest(c->table, size, c->digests + 16 * (size_t)rank))
        fail("D002", path, "bytes [0, %" PRIu64 ") have another digest", size);
    c->table_rank = rank;
    c->table_blocks = size / 16;
    close(file);
    close(directory);
}

void check_block(Checkpoint *c, const File *file, uint64_t block, const void *data, uint64_t begin, size_t size) {
    char path[PATH_ROOM];
    read_table(c, file->rank);
    uint64_t number = file->first_block + block;
    bool listed = number < c->table_blocks;
    if (listed && has_digest(data, size, c->table + 16 * number)) return;
    path_of_file(c, file, path);
    if (!listed) fail("D001", path, "its rank's table has no digest %" PRIu64, number);
    fail("D003", path, "bytes [%" PRIu64 ", %" PRIu64 ") have another digest", begin, (begin + size));
}

/* ---- tensors ---- */

typedef struct {
    uint32_t part, row, copy;
    Piece *pieces;
    size_t count, room;
} Wanted;

static void gather(Checkpoint *c, const Piece *piece, void *context) {
    Wanted *wanted = context;
    if (piece->part != wanted->part || piece->row != wanted->row || piece->copy != wanted->copy) return;
    claim(c, piece, NULL);
    wanted->pieces = grow(wanted->pieces, wanted->count, &wanted->room, sizeof *wanted->pieces);
    wanted->pieces[wanted->count++] = *piece;
}

uint8_t *load_tensor(Checkpoint *c, uint32_t part, uint32_t row, uint32_t copy, uint64_t *size) {
    const Chunk *chunk = c->chunks;
    while (chunk->layout != c->parts[part].layout || row < chunk->first_row || row - chunk->first_row >= chunk->rows)
        chunk++;
    Wanted wanted = {.part = part, .row = row, .copy = copy};
    read_chunk(c, chunk, gather, &wanted);
    if (wanted.count == 0) return NULL;
    /* The lengths of the files (F003) and their sum (I007) are checked before memory is allocated. */
    for (size_t i = 0; i < wanted.count; i++) close(open_data_file(c, &c->files[wanted.pieces[i].file]));

    uint64_t element = element_bytes(c, part, row);
    *size = shape_of(c, part, row)->product.elements * element;
    uint8_t *tensor = allocate(*size, 1);
    for (size_t i = 0; i < wanted.count; i++) {
        const Piece *piece = &wanted.pieces[i];
        File *from = &c->files[piece->file];
        uint8_t *to = tensor + piece->start * element;
        uint64_t bytes = (piece->stop - piece->start) * element, begin = from->data_start + piece->offset;
        int file = open_data_file(c, from);
        for (uint64_t done = 0, block = piece->block; done < bytes; done += c->block_bytes, block++) {
            size_t n = bytes - done < c->block_bytes ? bytes - done : c->block_bytes;
            if (!read_at(file, begin + done, to + done, n)) fail("F003", "a data file", "has become shorter");
            check_block(c, from, block, to + done, begin + done, n);
        }
        from->claimed -= bytes; /* I007 counts only what one call asks for. */
        close(file);
    }
    free(wanted.pieces);
    return in_row_major_order(grid_of(c, part, row), shape_of(c, part, row), tensor, *size, (unsigned)element);
}
