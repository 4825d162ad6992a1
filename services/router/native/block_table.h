/* Which row holds which block, in which tier. Implements the port in block_table.py.
 *
 * A row's blocks belong to its *life*. Clearing a row marks its life dead, in constant time, and gives the row a new
 * one. Each later change of the table sweeps some lines: it removes dead lives from them.
 */
#ifndef BATON_BLOCK_TABLE_H
#define BATON_BLOCK_TABLE_H

#include "block_map.h"

enum {
    TIERS = 5,    /* of KvTier, in its order */
    MEMORIES = 4, /* those before BOUNDARY */
    BOUNDARY = 4,
    ROWS_MAX = 32768, /* half of the lives; the other half may be dead and not swept yet */
    AHEAD = 12, /* distance in look-ups at which memory is prefetched */
    EXPECTED_MAX = 64, /* blocks whose memory is prefetched for a later call; more would not stay in the cache */
    CHUNK = 32, /* look-ups between two checks whether any row still holds the chain */
    SWEPT_LINES_MIN = 64,
    SWEPT_LINES_PER_BLOCK = 4,
    LOST_MAX = 16384, /* blocks that nobody holds any more and that are remembered */
    EVICTED_MAX = 65536, /* evictions that are counted until all counts are halved, so that old ones are forgotten */
};

enum state { FREE = 0, ALIVE, DEAD };

struct life {
    uint64_t counts[TIERS];
    uint64_t xors[TIERS];
    uint64_t evicted, restored; /* see `evictions` in block_table.py */
    uint64_t dead_in; /* the sweep pass during which it died */
    enum state state;
};

struct sweep {
    uint64_t pass;
    int tier, shard;
    uint64_t line;
    set_t last, last_left; /* the last set examined, and the set without its dead lives */
};

struct block_table {
    struct block_map maps[TIERS];
    struct holder_sets sets;
    life_t *life_of; /* by row; NO_LIFE: the row holds nothing */
    uint32_t rows;
    struct life *lives;
    uint32_t *row_of; /* by life: close together, because a match reads those of all holders */
    uint32_t life_count;
    uint64_t *dead; /* bits by life */
    uint32_t dead_count;
    struct sweep sweep;
    uint64_t *lost; /* LOST_MAX places; newer blocks take the places of older ones */
    uint64_t evicted;
};

struct source {
    uint32_t row;
    uint64_t first, end;
};

void table_open(struct block_table *table);
void table_close(struct block_table *table);
uint64_t table_bytes(const struct block_table *table);

void table_store(struct block_table *table, uint32_t row, int tier, const uint64_t *blocks, size_t count);
void table_remove(struct block_table *table, uint32_t row, int tier, const uint64_t *blocks, size_t count);
void table_clear(struct block_table *table, uint32_t row);
void table_sweep_all(struct block_table *table);

/* NULL when the row holds nothing. */
const struct life *table_life(const struct block_table *table, uint32_t row);
bool table_held(struct block_table *table, uint64_t block);
/* Writes the blocks that the row holds in the tier; `blocks` has room for the life's count. */
void table_blocks(struct block_table *table, uint32_t row, int tier, uint64_t *blocks);

/* table_match.c */
void table_depths(struct block_table *table, const uint64_t *blocks, size_t count, int32_t *out, uint32_t rows);
/* As Boundaries in block_table.py. */
struct boundaries {
    size_t stride, step, window, window_blocks, full_beyond, window_beyond;
    int is_narrow;
    size_t short_by; /* `short` is a word of C */
};
#define NARROW_MARK 0x9e3779b97f4a7c15ull /* as in shared/contracts/kv_events.py */
/* Writes each row's longest usable prefix of a model with boundaries. `step`, `window`, `window_blocks` are positive. */
void table_boundaries(struct block_table *table, const uint64_t *blocks, size_t count, const struct boundaries *at,
                      int32_t *out, uint32_t rows);
/* Writes at most `end` - `first` sources; returns how many. */
size_t table_cover(struct block_table *table, const uint64_t *blocks, size_t first, size_t end, const uint8_t *allowed,
                   uint32_t rows, struct source *sources);

static inline uint32_t table_words(const struct block_table *table)
{
    return (table->life_count + 63) / 64;
}

#endif
