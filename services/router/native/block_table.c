#include "block_table.h"

#include <stdlib.h>
#include <string.h>

static const uint32_t LIVES_AT_FIRST = 64;

void table_open(struct block_table *table)
{
    memset(table, 0, sizeof *table);
    for (int tier = 0; tier < TIERS; tier++)
        map_open(&table->maps[tier]);
    sets_open(&table->sets);
    table->dead = must(calloc(LIVES_MAX / 64 + 1, sizeof *table->dead));
    table->lost = must(calloc(LOST_MAX, sizeof *table->lost));
}

void table_close(struct block_table *table)
{
    for (int tier = 0; tier < TIERS; tier++)
        map_close(&table->maps[tier]);
    sets_close(&table->sets);
    free(table->life_of);
    free(table->lives);
    free(table->row_of);
    free(table->dead);
    free(table->lost);
}

uint64_t table_bytes(const struct block_table *table)
{
    uint64_t bytes = sets_bytes(&table->sets) + table->life_count * (sizeof *table->lives + sizeof *table->row_of);
    bytes += LOST_MAX * sizeof *table->lost;
    for (int tier = 0; tier < TIERS; tier++)
        bytes += map_bytes(&table->maps[tier]);
    return bytes;
}

/* Rows and their lives. */

const struct life *table_life(const struct block_table *table, uint32_t row)
{
    life_t life = row < table->rows ? table->life_of[row] : NO_LIFE;
    return life == NO_LIFE ? NULL : &table->lives[life];
}

static life_t new_life(struct block_table *table, uint32_t row)
{
    uint32_t life = 0;
    while (life < table->life_count && table->lives[life].state != FREE)
        life++;
    if (life == LIVES_MAX) {
        table_sweep_all(table);
        return new_life(table, row);
    }
    if (life == table->life_count) {
        table->life_count = life ? life * 2 : LIVES_AT_FIRST;
        if (table->life_count > LIVES_MAX)
            table->life_count = LIVES_MAX;
        table->lives = must(realloc(table->lives, table->life_count * sizeof *table->lives));
        memset(table->lives + life, 0, (table->life_count - life) * sizeof *table->lives);
        table->row_of = must(realloc(table->row_of, table->life_count * sizeof *table->row_of));
    }
    table->lives[life] = (struct life){.state = ALIVE};
    table->row_of[life] = row;
    return (life_t)life;
}

static life_t life_of(struct block_table *table, uint32_t row)
{
    if (row >= table->rows) {
        uint32_t rows = row + row / 2 + 16;
        table->life_of = must(realloc(table->life_of, rows * sizeof *table->life_of));
        while (table->rows < rows)
            table->life_of[table->rows++] = NO_LIFE;
    }
    if (table->life_of[row] == NO_LIFE)
        table->life_of[row] = new_life(table, row);
    return table->life_of[row];
}

/* Sweeping: removing dead lives from the table. */

static void next_shard(struct block_table *table)
{
    struct sweep *sweep = &table->sweep;
    struct block_map *map = &table->maps[sweep->tier];
    map_shrink(map, &map->shards[sweep->shard]);
    sweep->line = 0;
    if (++sweep->shard < SHARDS)
        return;
    sweep->shard = 0;
    if (++sweep->tier < TIERS)
        return;
    sweep->tier = 0;
    for (uint32_t life = 0; life < table->life_count; life++)
        if (table->lives[life].state == DEAD && table->lives[life].dead_in < sweep->pass) {
            table->lives[life].state = FREE;
            table->dead[life / 64] &= ~(1ull << life % 64);
            table->dead_count--;
        }
    sweep->pass++;
}

static set_t without_dead(struct block_table *table, set_t set)
{
    struct sweep *sweep = &table->sweep;
    if (sweep->last != set) {
        sweep->last_left = sets_without(&table->sets, set, table->dead, table_words(table));
        sweep->last = set;
    }
    return sweep->last_left;
}

/* Removes dead lives from up to `lines` lines. The cached set is valid in one call only: see `sets_free`. */
static void sweep_lines(struct block_table *table, uint64_t lines)
{
    struct sweep *sweep = &table->sweep;
    for (sweep->last = sweep->last_left = 0; table->dead_count && lines--;) {
        struct block_map *map = &table->maps[sweep->tier];
        struct shard *shard = &map->shards[sweep->shard];
        if (sweep->line == shard->line_count) {
            next_shard(table);
            continue;
        }
        struct line *line = &shard->lines[sweep->line++];
        for (int at = line->count; at--;) {
            set_t before = line->sets[at], left = without_dead(table, before);
            if (left == before)
                continue;
            if (left) {
                line->sets[at] = left;
                sets_keep(&table->sets, left);
            } else
                map_take(map, map_find(map, line->blocks[at]));
            sets_release(&table->sets, before);
            if (!table->sets.sets[before].refs)
                sweep->last = 0;
        }
    }
}

void table_sweep_all(struct block_table *table)
{
    while (table->dead_count)
        sweep_lines(table, UINT64_MAX);
}

static void made_anew(struct block_table *table, int tier, const struct shard *shard)
{
    struct sweep *sweep = &table->sweep;
    if (sweep->tier == tier && shard == &table->maps[tier].shards[sweep->shard])
        sweep->line = 0;
}

void table_clear(struct block_table *table, uint32_t row)
{
    const struct life *life = table_life(table, row);
    if (life == NULL)
        return;
    uint32_t number = table->life_of[row];
    uint64_t held = 0;
    for (int tier = 0; tier < TIERS; tier++)
        held += life->counts[tier];
    table->life_of[row] = NO_LIFE;
    table->lives[number].dead_in = table->sweep.pass;
    table->lives[number].state = held ? DEAD : FREE;
    if (held) {
        table->dead[number / 64] |= 1ull << number % 64;
        table->dead_count++;
    }
}

/* Blocks. */

/* The first of a batch, which is often shorter than AHEAD; the others follow one by one. */
static void fetch_first(struct block_map *map, const uint64_t *blocks, size_t count)
{
    for (size_t i = 0; i < AHEAD && i < count; i++)
        map_prefetch(map, blocks[i]);
}

static void change(struct life *life, int tier, uint64_t block, enum step step)
{
    life->counts[tier] += step == ADD ? 1 : (uint64_t)-1;
    life->xors[tier] ^= block;
}

/* Evictions. Where the device holds more blocks than are remembered, only those are counted whose hash ends with some
 * zeros: so those remembered reach back about as far as the caches.
 */

struct sample {
    int bits;
    uint64_t mask; /* a block is counted if none of these bits is set */
};

static struct sample sample_of(const struct block_table *table, int tier)
{
    uint64_t times = table->maps[0].block_count / LOST_MAX;
    int bits = times ? 64 - __builtin_clzll(times) : 0;
    return (struct sample){bits, tier < MEMORIES ? (1ull << bits) - 1 : UINT64_MAX};
}

static bool is_alive(const struct block_table *table, set_t set)
{
    return set && (!table->dead_count || sets_beyond(&table->sets, set, table->dead));
}

static bool is_in_other_memory(struct block_table *table, int tier, uint64_t block)
{
    for (int other = 0; other < MEMORIES; other++)
        if (other != tier && table->maps[other].block_count && is_alive(table, map_get(&table->maps[other], block)))
            return true;
    return false;
}

static void forget_half(struct block_table *table)
{
    table->evicted /= 2;
    for (uint32_t life = 0; life < table->life_count; life++) {
        table->lives[life].evicted /= 2;
        table->lives[life].restored /= 2;
    }
}

/* A life has lost a block of this tier; `is_last`: nobody else holds it there. */
static void evicted(struct block_table *table, struct life *life, int tier, uint64_t block, bool is_last, int bits)
{
    if (tier == 0) {
        life->evicted++;
        if (++table->evicted >= EVICTED_MAX)
            forget_half(table);
    }
    if (is_last && block && !is_in_other_memory(table, tier, block))
        table->lost[(block >> bits) % LOST_MAX] = block;
}

/* A life has got a block of this tier that nobody held there. */
static void restored(struct block_table *table, struct life *life, uint64_t block, int bits)
{
    uint64_t *lost = &table->lost[(block >> bits) % LOST_MAX];
    if (*lost && *lost == block) {
        *lost = 0;
        life->restored++;
    }
}

void table_store(struct block_table *table, uint32_t row, int tier, const uint64_t *blocks, size_t count)
{
    life_t number = life_of(table, row);
    struct life *life = &table->lives[number];
    struct block_map *map = &table->maps[tier];
    set_t from = NO_SET, to = NO_SET; /* the cached last step; each new set gets a reference at once */
    struct sample sample = sample_of(table, tier);
    fetch_first(map, blocks, count);
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            map_prefetch(map, blocks[i + AHEAD]);
        struct place place = map_find(map, blocks[i]);
        set_t before = place.line ? place.line->sets[place.at] : 0;
        if (before != from) {
            from = before;
            to = sets_step(&table->sets, before, number, ADD);
        }
        if (to == before)
            continue;
        if (!(blocks[i] & sample.mask) && !is_alive(table, before))
            restored(table, life, blocks[i], sample.bits);
        sets_keep(&table->sets, to);
        if (place.line) {
            place.line->sets[place.at] = to;
            sets_release(&table->sets, before);
        } else if (map_add(map, place, blocks[i], to))
            made_anew(table, tier, place.shard);
        change(life, tier, blocks[i], ADD);
    }
    sweep_lines(table, SWEPT_LINES_MIN + SWEPT_LINES_PER_BLOCK * count);
}

void table_remove(struct block_table *table, uint32_t row, int tier, const uint64_t *blocks, size_t count)
{
    if (table_life(table, row) == NULL)
        return;
    life_t number = table->life_of[row];
    struct life *life = &table->lives[number];
    struct block_map *map = &table->maps[tier];
    struct sample sample = sample_of(table, tier);
    fetch_first(map, blocks, count);
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            map_prefetch(map, blocks[i + AHEAD]);
        struct place place = map_find(map, blocks[i]);
        if (!place.line)
            continue;
        set_t before = place.line->sets[place.at], to = sets_step(&table->sets, before, number, TAKE);
        if (to == before)
            continue;
        if (to) {
            place.line->sets[place.at] = to;
            sets_keep(&table->sets, to);
        } else {
            map_take(map, place);
            if (map_shrink(map, place.shard))
                made_anew(table, tier, place.shard);
        }
        sets_release(&table->sets, before);
        change(life, tier, blocks[i], TAKE);
        if (!(blocks[i] & sample.mask))
            evicted(table, life, tier, blocks[i], !is_alive(table, to), sample.bits);
    }
    sweep_lines(table, SWEPT_LINES_MIN + SWEPT_LINES_PER_BLOCK * count);
}

bool table_held(struct block_table *table, uint64_t block)
{
    for (int tier = 0; tier < TIERS; tier++)
        if (table->maps[tier].block_count && is_alive(table, map_get(&table->maps[tier], block)))
            return true;
    return false;
}

void table_blocks(struct block_table *table, uint32_t row, int tier, uint64_t *blocks)
{
    const struct life *life = table_life(table, row);
    struct block_map *map = &table->maps[tier];
    for (struct shard *shard = map->shards; life && life->counts[tier] && shard < map->shards + SHARDS; shard++)
        for (struct line *line = shard->lines; line < shard->lines + shard->line_count; line++)
            for (int at = 0; at < line->count; at++)
                if (sets_has(&table->sets, line->sets[at], table->life_of[row]))
                    *blocks++ = line->blocks[at];
}
