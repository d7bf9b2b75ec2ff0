/* Section 4 of the format: grids, which are orders of the elements of tensors. */
#include "reader.h"

#include <stdlib.h>
#include <string.h>

void add_dimension(Grid *g) {
    g->dimensions++;
    g->sections = 0;
}

void add_section(Grid *g) {
    g->bad |= g->half || (g->sections && g->empty);
    g->sections++;
    g->divided = g->empty = true;
}

void add_number(Grid *g, uint64_t number) {
    if (!g->half) {
        g->intervals = grow(g->intervals, g->count, &g->room, sizeof *g->intervals);
        g->intervals[g->count] = (Interval){g->dimensions - 1, g->sections - 1, number, 0};
    } else {
        g->bad |= number == 0;
        g->intervals[g->count++].count = number;
    }
    g->half = !g->half;
    g->empty = false;
}

void end_dimension(Grid *g) {
    g->bad |= g->half || (g->sections && g->empty) || g->sections > MEBI;
    g->boxes = (g->boxes ? g->boxes : 1) * (g->sections && !g->bad ? g->sections : 1);
    g->bad |= g->boxes > MEBI;
}

static int compare_intervals(const void *a, const void *b) {
    const Interval *x = a, *y = b;
    if (x->dimension != y->dimension) return x->dimension < y->dimension ? -1 : 1;
    return (x->first > y->first) - (x->first < y->first);
}

/* Returns the number of indices of a divided dimension, or 0 if the dimension is not divided or has an index twice or
   not at all. *intervals becomes the number of its intervals. `sorted` has all intervals by dimension and index. */
static uint64_t indices_of(const Grid *g, const Interval *sorted, uint32_t dimension, size_t *intervals) {
    uint64_t end = 0;
    *intervals = 0;
    for (size_t i = 0; i < g->count; i++) {
        if (sorted[i].dimension != dimension) continue;
        if (sorted[i].first != end || sorted[i].count > UINT_LIMIT - 1 - end) return 0;
        end += sorted[i].count;
        (*intervals)++;
    }
    return end;
}

static Interval *sort_intervals(const Grid *g) {
    Interval *sorted = allocate(g->count, sizeof *sorted);
    if (g->count) {
        memcpy(sorted, g->intervals, g->count * sizeof *sorted);
        qsort(sorted, g->count, sizeof *sorted, compare_intervals);
    }
    return sorted;
}

bool grid_is_sound(const Grid *g) {
    if (g->bad || g->dimensions > MAX_DIMENSIONS) return false;
    if (!g->divided) return g->dimensions == 0;
    Interval *sorted = sort_intervals(g);
    bool sound = true;
    for (size_t i = 0; i < g->count; i++) {
        size_t intervals;
        if (i > 0 && sorted[i].dimension == sorted[i - 1].dimension) continue;
        sound &= indices_of(g, sorted, sorted[i].dimension, &intervals) > 0 && intervals > 1;
    }
    free(sorted);
    return sound;
}

bool grid_fits(const Grid *g, uint32_t dimensions, const uint64_t *sizes, uint64_t elements) {
    if (!g->divided) return true;
    if (g->dimensions != dimensions || elements == 0) return false;
    Interval *sorted = sort_intervals(g);
    bool fits = true;
    for (size_t i = 0; i < g->count; i++) {
        size_t intervals;
        if (i == 0 || sorted[i].dimension != sorted[i - 1].dimension)
            fits &= indices_of(g, sorted, sorted[i].dimension, &intervals) == sizes[sorted[i].dimension];
    }
    free(sorted);
    return fits;
}

bool same_grid(const Grid *a, const Grid *b) {
    if (a->dimensions != b->dimensions || a->count != b->count) return false;
    for (size_t i = 0; i < a->count; i++) {
        const Interval *x = &a->intervals[i], *y = &b->intervals[i];
        if (x->dimension != y->dimension || x->section != y->section || x->first != y->first || x->count != y->count)
            return false;
    }
    return true;
}

/* The indices of one dimension in the order of the grid, and where its sections begin. */
typedef struct {
    uint64_t *indices, *starts, sections, stride;
} Order;

static Order order_of(const Grid *g, uint32_t dimension, uint64_t size) {
    Order order = {allocate(size, sizeof *order.indices), allocate(size + 2, sizeof *order.starts), 0, 1};
    uint64_t at = 0;
    for (size_t i = 0; i < g->count; i++) {
        const Interval *interval = &g->intervals[i];
        if (interval->dimension != dimension) continue;
        if (interval->section == order.sections) order.starts[order.sections++] = at;
        for (uint64_t j = 0; j < interval->count; j++) order.indices[at++] = interval->first + j;
    }
    if (order.sections == 0) {
        order.sections = 1;
        while (at < size) order.indices[at] = at, at++;
    }
    order.starts[order.sections] = at;
    return order;
}

/* Goes on to the next combination of numbers below `ends`, the last one first. Returns false after the last one. */
static bool next_of(uint64_t *numbers, const uint64_t *begins, const uint64_t *ends, uint32_t count) {
    while (count--) {
        if (++numbers[count] < ends[count]) return true;
        numbers[count] = begins[count];
    }
    return false;
}

uint8_t *in_row_major_order(const Grid *g, const Shape *shape, uint8_t *tensor, size_t size, unsigned element) {
    if (!g->divided) return tensor;
    uint64_t sizes[MAX_DIMENSIONS], box[MAX_DIMENSIONS] = {0}, none[MAX_DIMENSIONS] = {0}, sections[MAX_DIMENSIONS];
    Order orders[MAX_DIMENSIONS];
    uint32_t dimensions = shape->dimensions;
    get_dimensions(shape, sizes);
    uint64_t stride = 1;
    for (uint32_t d = dimensions; d--; stride *= sizes[d]) {
        orders[d] = order_of(g, d, sizes[d]);
        orders[d].stride = stride;
        sections[d] = orders[d].sections;
    }
    uint8_t *result = allocate(size, 1), *from = tensor;
    do {
        uint64_t at[MAX_DIMENSIONS], begins[MAX_DIMENSIONS], ends[MAX_DIMENSIONS];
        for (uint32_t d = 0; d < dimensions; d++) {
            at[d] = begins[d] = orders[d].starts[box[d]];
            ends[d] = orders[d].starts[box[d] + 1];
        }
        do {
            uint64_t place = 0;
            for (uint32_t d = 0; d < dimensions; d++) place += orders[d].indices[at[d]] * orders[d].stride;
            memcpy(result + place * element, from, element);
            from += element;
        } while (next_of(at, begins, ends, dimensions));
    } while (next_of(box, none, sections, dimensions));
    for (uint32_t d = 0; d < dimensions; d++) free(orders[d].indices), free(orders[d].starts);
    free(tensor);
    return result;
}
