#include "block_map.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const double FULL = 0.875, FULL_AFTER = 0.55, NEARLY_EMPTY = 0.2; /* shares of a shard's capacity */
static const size_t MAPPED_BYTES_MIN = 1 << 18; /* larger arrays are mapped: munmap returns their memory */
static const size_t HUGE_BYTES = 2 << 20, PAGE_BYTES = 4096;

static struct line *lines_open(uint64_t count)
{
    size_t bytes = count * sizeof(struct line);
    if (bytes < MAPPED_BYTES_MIN)
        return memset(must(aligned_alloc(sizeof(struct line), bytes)), 0, bytes);
    size_t spare = bytes < HUGE_BYTES ? 0 : HUGE_BYTES;
    char *memory = mmap(NULL, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(memory == MAP_FAILED ? NULL : memory);
    if (spare) { /* Huge pages are aligned to their size: unmap what lies outside. */
        size_t before = -(uintptr_t)memory % HUGE_BYTES;
        size_t behind = (before + bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
        if (before)
            munmap(memory, before);
        munmap(memory + behind, bytes + spare - behind);
        memory += before;
        madvise(memory, bytes, MADV_HUGEPAGE);
    }
    return (struct line *)memory;
}

static void lines_close(struct line *lines, uint64_t count)
{
    size_t bytes = count * sizeof(struct line);
    if (bytes < MAPPED_BYTES_MIN)
        free(lines);
    else
        munmap(lines, bytes);
}

void map_open(struct block_map *map)
{
    map->block_count = 0;
    map->odd = (uint64_t)(uintptr_t)map * 0x9E3779B97F4A7C15u | 1;
    for (struct shard *shard = map->shards; shard < map->shards + SHARDS; shard++)
        *shard = (struct shard){lines_open(LINES_MIN), LINES_MIN, 0};
}

void map_close(struct block_map *map)
{
    for (struct shard *shard = map->shards; shard < map->shards + SHARDS; shard++)
        lines_close(shard->lines, shard->line_count);
}

uint64_t map_bytes(const struct block_map *map)
{
    uint64_t bytes = 0;
    for (int i = 0; i < SHARDS; i++)
        bytes += map->shards[i].line_count * sizeof(struct line);
    return bytes;
}

static void put(struct shard *shard, struct line *home, uint64_t block, set_t set)
{
    struct line *line = home, *end = shard->lines + shard->line_count;
    while (line->count == LINE_BLOCKS) {
        line->past += line->past < PAST_MAX;
        if (++line == end)
            line = shard->lines;
    }
    line->blocks[line->count] = block;
    line->sets[line->count++] = set;
    shard->block_count++;
}

/* Resizes the shard for its contents. Lines are ordered by mixed hash, so both arrays are accessed in order. */
static void make_anew(struct block_map *map, struct shard *shard)
{
    struct shard old = *shard;
    uint64_t lines = (uint64_t)((double)old.block_count / (LINE_BLOCKS * FULL_AFTER)) + 1;
    shard->line_count = lines < LINES_MIN ? LINES_MIN : lines;
    shard->lines = lines_open(shard->line_count);
    shard->block_count = 0;
    for (struct line *line = old.lines; line < old.lines + old.line_count; line++)
        for (int at = 0; at < line->count; at++) {
            struct line *home;
            map_shard(map, line->blocks[at], &home);
            put(shard, home, line->blocks[at], line->sets[at]);
        }
    lines_close(old.lines, old.line_count);
}

bool map_add(struct block_map *map, struct place place, uint64_t block, set_t set)
{
    struct shard *shard = place.shard;
    bool full = (double)(shard->block_count + 1) > FULL * LINE_BLOCKS * (double)shard->line_count;
    if (full) {
        make_anew(map, shard);
        map_shard(map, block, &place.home);
    }
    put(shard, place.home, block, set);
    map->block_count++;
    return full;
}

void map_take(struct block_map *map, struct place place)
{
    struct shard *shard = place.shard;
    struct line *end = shard->lines + shard->line_count;
    for (struct line *line = place.home; line != place.line;) {
        line->past -= line->past < PAST_MAX;
        if (++line == end)
            line = shard->lines;
    }
    int last = --place.line->count;
    place.line->blocks[place.at] = place.line->blocks[last];
    place.line->sets[place.at] = place.line->sets[last];
    shard->block_count--;
    map->block_count--;
}

bool map_shrink(struct block_map *map, struct shard *shard)
{
    double room = LINE_BLOCKS * (double)shard->line_count;
    bool much = shard->line_count > 4 * LINES_MIN && (double)shard->block_count < NEARLY_EMPTY * room;
    if (much)
        make_anew(map, shard);
    return much;
}
