#include "block_map.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const double FULL = 0.875, FULL_AFTER = 0.55, NEARLY_EMPTY = 0.2; /* shares of a shard's capacity */
static const double LINES_SHARE_MIN = 0.9, LINES_SHARE_MAX = 1.2; /* of the lines that a shard wants */
static const size_t MAPPED_BYTES_MIN = 1 << 18; /* of a region; munmap and madvise return memory, free does not always */
static const size_t HUGE_BYTES = 2 << 20, PAGE_BYTES = 4096;

static size_t region_bytes(const struct region *region)
{
    return SHARDS * region->shard_lines * sizeof(struct line);
}

static struct region *region_open(uint64_t shard_lines)
{
    struct region *region = must(malloc(sizeof *region));
    *region = (struct region){NULL, shard_lines, 0};
    size_t bytes = region_bytes(region);
    if (bytes < MAPPED_BYTES_MIN) {
        region->lines = memset(must(aligned_alloc(sizeof(struct line), bytes)), 0, bytes);
        return region;
    }
    char *memory = mmap(NULL, bytes + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(memory == MAP_FAILED ? NULL : memory);
    size_t before = -(uintptr_t)memory % HUGE_BYTES; /* Huge pages are aligned to their size: unmap what lies outside. */
    size_t behind = (before + bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (before)
        munmap(memory, before);
    if (behind < bytes + HUGE_BYTES)
        munmap(memory + behind, bytes + HUGE_BYTES - behind);
    region->lines = (struct line *)(memory + before);
    madvise(region->lines, bytes, MADV_HUGEPAGE);
    return region;
}

static void region_close(struct region *region)
{
    if (region_bytes(region) < MAPPED_BYTES_MIN)
        free(region->lines);
    else
        munmap(region->lines, region_bytes(region));
    free(region);
}

/* Gives an empty shard its part of the newest region, or of a new one. */
static void lines_take(struct block_map *map, struct shard *shard, uint64_t wanted)
{
    struct region *region = map->newest;
    if (region == NULL || region == shard->region || (double)region->shard_lines < LINES_SHARE_MIN * (double)wanted ||
        (double)region->shard_lines > LINES_SHARE_MAX * (double)wanted)
        region = map->newest = region_open(wanted);
    region->users++;
    shard->region = region;
    shard->lines = region->lines + (size_t)(shard - map->shards) * region->shard_lines;
    shard->line_count = region->shard_lines;
}

/* Returns the memory of lines that a shard used. */
static void lines_return(struct line *lines, struct region *region)
{
    if (--region->users == 0) {
        region_close(region);
        return;
    }
    if (region_bytes(region) < MAPPED_BYTES_MIN)
        return;
    uintptr_t begin = ((uintptr_t)lines + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    uintptr_t end = (uintptr_t)(lines + region->shard_lines) / PAGE_BYTES * PAGE_BYTES;
    if (begin < end)
        madvise((void *)begin, end - begin, MADV_DONTNEED);
}

void map_open(struct block_map *map)
{
    map->block_count = 0;
    map->odd = (uint64_t)(uintptr_t)map * 0x9E3779B97F4A7C15u | 1;
    map->newest = NULL;
    for (struct shard *shard = map->shards; shard < map->shards + SHARDS; shard++) {
        *shard = (struct shard){0};
        lines_take(map, shard, LINES_MIN);
    }
}

void map_close(struct block_map *map)
{
    for (struct shard *shard = map->shards; shard < map->shards + SHARDS; shard++)
        lines_return(shard->lines, shard->region);
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
    lines_take(map, shard, lines < LINES_MIN ? LINES_MIN : lines);
    shard->block_count = 0;
    for (struct line *line = old.lines; line < old.lines + old.line_count; line++)
        for (int at = 0; at < line->count; at++) {
            struct line *home;
            map_shard(map, line->blocks[at], &home);
            put(shard, home, line->blocks[at], line->sets[at]);
        }
    lines_return(old.lines, old.region);
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
