/* The commands, which README.md lists. */
#include "reader.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static Bytes text_of(const char *string) {
    return (Bytes){(const uint8_t *)string, (const uint8_t *)strchr(string, 0)};
}

static void write_out(const void *data, size_t size) {
    if (fwrite(data, 1, size, stdout) != size || fflush(stdout)) fail(NULL, "stdout", "cannot be written");
}

/* Reads the number of a rank or copy from the command line. */
static uint64_t number(const char *word) {
    Bytes text = text_of(word);
    uint64_t value;
    if (!read_decimal(&text, &value) || text.at != text.end || value > UINT32_MAX)
        fail(NULL, word, "is no number of a rank or copy");
    return value;
}

static void check_trees(Checkpoint *c) {
    uint64_t size;
    check_tree(c, c->state, "state");
    for (uint64_t rank = 0; rank < c->world_size; rank++) free(load_rank_tree(c, rank, &size));
}

/* Checks F001 to F003 of all data files, and all chunks of the index. */
static void check_files_and_index(Checkpoint *c, Visit *visit) {
    for (size_t i = 0; i < c->file_count; i++) close(open_data_file(c, &c->files[i]));
    for (size_t i = 0; i < c->chunk_count; i++) read_chunk(c, &c->chunks[i], visit, NULL);
}

/* The blocks of one data file in the digest table. */
typedef struct {
    uint64_t first, count;
} BlockRange;

static int compare_first_blocks(const void *a, const void *b) {
    const BlockRange *x = a, *y = b;
    return (x->first > y->first) - (x->first < y->first);
}

/* Checks the digest table of one rank and its `count` data files. */
static void validate_rank(Checkpoint *c, uint32_t rank, File *files, size_t count) {
    char path[PATH_ROOM];
    snprintf(path, sizeof path, "data-%s/rank-%05u/digests.bin", c->save_id, rank);
    read_table(c, rank);
    BlockRange *blocks = allocate(count, sizeof *blocks);
    uint64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        blocks[i].first = files[i].first_block;
        blocks[i].count = check_data_file(c, &files[i]);
    }
    qsort(blocks, count, sizeof *blocks, compare_first_blocks);
    for (size_t i = 0; i < count; i++) {
        if (blocks[i].first != end)
            fail("D001", path, "a file begins at block %" PRIu64 ", not %" PRIu64, blocks[i].first, end);
        end += blocks[i].count;
    }
    if (end != c->table_blocks)
        fail("D001", path, "has %" PRIu64 " digests for %" PRIu64 " blocks", c->table_blocks, end);
    free(blocks);
}

static void validate(Checkpoint *c, char **unused) {
    (void)unused;
    check_index_length(c);
    check_files_and_index(c, claim_and_keep);
    size_t file = 0;
    for (uint32_t rank = 0; rank < c->world_size; rank++) {
        size_t first = file;
        while (file < c->file_count && c->files[file].rank == rank) file++;
        validate_rank(c, rank, c->files + first, file - first);
    }
    for (file = 0; file < c->file_count; file++) c->files[file].claimed = 0;
    check_trees(c);
    puts("ok");
}

static void load(Checkpoint *c, char **unused) {
    (void)unused;
    uint64_t size;
    check_files_and_index(c, claim);
    for (size_t i = 0; i < c->file_count; i++) c->files[i].claimed = 0;
    for (uint32_t part = 0; part < c->part_count; part++)
        for (uint32_t row = 0; row < c->parts[part].count; row++)
            for (uint32_t copy = 0; copy < c->world_size; copy++) {
                uint8_t *tensor = load_tensor(c, part, row, copy, &size);
                if (!tensor) break;
                free(tensor);
            }
    check_trees(c);
    puts("ok");
}

static void list(Checkpoint *c, char **unused) {
    (void)unused;
    for (uint32_t p = 0; p < c->part_count; p++) {
        const Part *part = &c->parts[p];
        if (equals(part->name, "state")) continue; /* Section 11: they are not tensors of a model. */
        for (uint32_t row = 0; row < part->count; row++) {
            Bytes name = c->names[part->names[row]];
            const Shape *shape = shape_of(c, p, row);
            uint64_t dimensions[MAX_DIMENSIONS];
            get_dimensions(shape, dimensions);
            write_out(part->name.at, length_of(part->name));
            putchar('/');
            write_out(name.at, length_of(name));
            printf("\t%s\t[", DTYPES[part->dtypes[row]].name);
            for (uint32_t i = 0; i < shape->dimensions; i++) printf("%s%" PRIu64, i ? "," : "", dimensions[i]);
            puts("]");
        }
    }
}

static void dump(Checkpoint *c, char **words) {
    const char *key = words[0], *copy = words[1];
    const char *slash = strchr(key, '/');
    uint32_t part, id, row;
    uint64_t size;
    if (!slash) fail(NULL, key, "is no key");
    Bytes name = text_of(slash + 1);
    find_alias(c, name, &name);
    if (!find_part(c, (Bytes){(const uint8_t *)key, (const uint8_t *)slash}, &part) || !find_name(c, name, &id) ||
        !find_row(&c->parts[part], id, &row))
        fail(NULL, key, "there is no such tensor");
    uint8_t *tensor = load_tensor(c, part, row, copy ? (uint32_t)number(copy) : 0, &size);
    if (!tensor) fail(NULL, key, "there is no such copy");
    write_out(tensor, size);
    free(tensor);
}

static void tree(Checkpoint *c, char **words) {
    const char *rank = words[0];
    uint64_t size = length_of(c->state);
    if (!rank) {
        check_tree(c, c->state, "state");
        write_out(c->state.at, size);
        return;
    }
    uint8_t *bytes = load_rank_tree(c, number(rank), &size);
    if (!bytes) fail(NULL, rank, "this rank has no tree");
    write_out(bytes, size);
    free(bytes);
}

static const struct {
    const char *name;
    int least, most;                          /* How many words may follow the name. */
    bool writes_data;                         /* Then errors go to stderr. */
    void (*run)(Checkpoint *c, char **words); /* The words behind the path, and then NULL. */
} COMMANDS[] = {
    {"validate", 1, 1, false, validate}, {"load", 1, 1, false, load}, {"list", 1, 1, true, list},
    {"dump", 2, 3, true, dump},          {"tree", 1, 2, true, tree},
};

int main(int count, char **words) {
    static Checkpoint c;
    for (size_t i = 0; i < sizeof COMMANDS / sizeof *COMMANDS; i++) {
        if (count < 2 || strcmp(words[1], COMMANDS[i].name)) continue;
        if (count - 2 < COMMANDS[i].least || count - 2 > COMMANDS[i].most) break;
        report = COMMANDS[i].writes_data ? stderr : stdout;
        open_checkpoint(&c, words[2]);
        COMMANDS[i].run(&c, words + 3);
        return 0;
    }
    fputs("usage: reader validate|load|list PATH, reader dump PATH KEY [COPY], reader tree PATH [RANK]\n", stderr);
    return 2;
}
