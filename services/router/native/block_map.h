/* A hash table of cache lines: maps a block's hash to the number of the set of its holders.
 *
 * A line holds five blocks, so that nearly every look-up costs one cache miss, which `map_prefetch` can start early.
 * A block that does not fit goes into the next line. Each full line counts the blocks that were placed past it, so that
 * a search knows when to stop and a removal needs no tombstones. The table is divided into shards that are resized one
 * by one, so no single operation moves more than one shard.
 */
#ifndef BATON_BLOCK_MAP_H
#define BATON_BLOCK_MAP_H

#include "holder_sets.h"

enum {
    LINE_BLOCKS = 5,
    SHARD_BITS = 5,
    SHARDS = 1 << SHARD_BITS,
    LINES_MIN = 2,
    PAST_MAX = UINT16_MAX, /* a saturated counter is not changed any more */
};

struct line {
    uint64_t blocks[LINE_BLOCKS];
    set_t sets[LINE_BLOCKS];
    uint16_t count;
    uint16_t past;
};

/* Memory for the lines of all shards, which mostly have equally many: they share its huge pages. With arrays of their own
 * 28 % of the lines of 10 million blocks were in small pages, where a look-up takes twice as long.
 */
struct region {
    struct line *lines;
    uint64_t shard_lines; /* each shard has its own part of that many lines, and uses it once */
    uint32_t users;       /* shards whose lines are here */
};

struct shard {
    struct line *lines;
    uint64_t line_count;
    uint64_t block_count;
    struct region *region;
};

struct block_map {
    struct shard shards[SHARDS];
    struct region *newest; /* where a shard that is resized goes, if its part has about the right size */
    uint64_t block_count;
    uint64_t odd; /* differs in each process, so that clients cannot construct blocks that collide in one line */
};

void map_open(struct block_map *map);
void map_close(struct block_map *map);
uint64_t map_bytes(const struct block_map *map);

/* Where a block is, or would be added. */
struct place {
    struct shard *shard;
    struct line *home; /* the line where a search begins */
    struct line *line; /* the line in which it was found; NULL if it was not */
    int at;
};

static inline struct shard *map_shard(struct block_map *map, uint64_t block, struct line **home)
{
    uint64_t mixed = block * map->odd;
    struct shard *shard = &map->shards[mixed >> (64 - SHARD_BITS)];
    *home = shard->lines + (uint64_t)((unsigned __int128)(mixed << SHARD_BITS) * shard->line_count >> 64);
    return shard;
}

static inline void map_prefetch(struct block_map *map, uint64_t block)
{
    struct line *home;
    map_shard(map, block, &home);
    __builtin_prefetch(home);
}

/* Compares all five without branching: a branch misprediction costs more than four comparisons. */
static inline int line_find(const struct line *line, uint64_t block)
{
    unsigned hits = 0;
    for (int at = 0; at < LINE_BLOCKS; at++)
        hits |= (unsigned)(line->blocks[at] == block) << at;
    hits &= (1u << line->count) - 1;
    return hits ? __builtin_ctz(hits) : -1;
}

/* Searches from line `home` on. */
static inline struct place map_find_from(struct shard *shard, struct line *home, uint64_t block)
{
    struct line *line = home, *end = shard->lines + shard->line_count;
    for (uint64_t left = shard->line_count; left--;) {
        int at = line_find(line, block);
        if (at >= 0)
            return (struct place){shard, home, line, at};
        if (!line->past)
            break;
        if (++line == end)
            line = shard->lines;
    }
    return (struct place){shard, home, NULL, 0};
}

static inline struct place map_find(struct block_map *map, uint64_t block)
{
    struct line *home;
    struct shard *shard = map_shard(map, block, &home);
    return map_find_from(shard, home, block);
}

static inline set_t map_get(struct block_map *map, uint64_t block)
{
    struct place place = map_find(map, block);
    return place.line ? place.line->sets[place.at] : 0;
}

/* The same for a block whose home line is known. */
static inline set_t map_get_at(struct block_map *map, struct line *home, uint64_t block)
{
    int at = line_find(home, block);
    if (at >= 0)
        return home->sets[at];
    return home->past ? map_get(map, block) : 0;
}

/* Adds a block that was searched for and not found. Returns whether its shard was rebuilt. */
bool map_add(struct block_map *map, struct place place, uint64_t block, set_t set);
/* Removes a block that was found; another block of its line may move to its place. */
void map_take(struct block_map *map, struct place place);
/* Shrinks the shard if it is nearly empty. Returns whether it was rebuilt. */
bool map_shrink(struct block_map *map, struct shard *shard);

#endif
