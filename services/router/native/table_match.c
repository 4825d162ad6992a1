#include "block_table.h"

#include <stdlib.h>
#include <string.h>

/* A block's sets of holders, by tier: two 64-bit words to compare. */
struct holders {
    set_t in[MEMORIES];
};

static inline bool same(const struct holders *one, const struct holders *other)
{
    return !memcmp(one, other, sizeof *one);
}

/* Iterates over the blocks of a chain and yields their holders as bits by life. */
struct walk {
    struct block_table *table;
    const uint64_t *blocks;
    uint64_t at, end;    /* the next block to look up, and the end of the range */
    struct holders found[CHUNK];
    uint64_t chunk_at, chunk_end; /* the range of blocks in `found` */
    struct line *homes[2][MEMORIES][CHUNK]; /* home lines of this chunk and of the next one; `turn` selects this one's */
    int turn;
    uint64_t bits[LIVES_MAX / 64 + 1];
    life_t changed; /* the only life that came or went with the last block, or NO_LIFE */
};

static uint64_t chunk_after(const struct walk *walk, uint64_t first)
{
    return first + CHUNK < walk->end ? first + CHUNK : walk->end;
}

/* Starts to prefetch the home lines of a whole chunk. */
static void walk_fetch(struct walk *walk, uint64_t first, int turn)
{
    uint64_t end = chunk_after(walk, first);
    for (int tier = 0; tier < MEMORIES; tier++)
        for (uint64_t i = first; walk->table->maps[tier].block_count && i < end; i++) {
            struct line **home = &walk->homes[turn][tier][i - first];
            map_shard(&walk->table->maps[tier], walk->blocks[i], home);
            __builtin_prefetch(*home);
        }
}

static void walk_begin(struct walk *walk, struct block_table *table, const uint64_t *blocks, uint64_t first,
                       uint64_t end)
{
    walk->table = table;
    walk->blocks = blocks;
    walk->at = walk->chunk_at = walk->chunk_end = first;
    walk->end = end;
    walk->turn = 0;
    walk_fetch(walk, first, 0);
}

/* Looks up a chunk while the next one is prefetched, and starts to prefetch the sets that are found: first what describes
 * them, then, when all are found, the members of those that differ by several from the one before.
 */
static void walk_look_up(struct walk *walk)
{
    uint64_t first = walk->chunk_end, end = chunk_after(walk, first);
    const struct holder_set *fetched[MEMORIES * CHUNK], *before = NULL;
    uint32_t fetched_count = 0;
    int tiers_found = 0;
    walk_fetch(walk, end, !walk->turn);
    memset(walk->found, 0, (end - first) * sizeof *walk->found);
    for (int tier = 0; tier < MEMORIES; tier++) {
        struct block_map *map = &walk->table->maps[tier];
        set_t last = 0;
        uint32_t others_count = fetched_count;
        for (uint64_t i = first; map->block_count && i < end; i++) {
            set_t set = map_get_at(map, walk->homes[walk->turn][tier][i - first], walk->blocks[i]);
            walk->found[i - first].in[tier] = set;
            if (set && set != last) {
                fetched[fetched_count++] = &walk->table->sets.sets[set];
                __builtin_prefetch(&walk->table->sets.sets[set]);
            }
            last = set;
        }
        tiers_found += fetched_count > others_count;
    }
    for (uint32_t i = 0; i < fetched_count; before = fetched[i++])
        if (tiers_found > 1 || before == NULL || before->count > fetched[i]->count + 1 || fetched[i]->count > before->count + 1)
            sets_fetch(fetched[i]);
    walk->turn = !walk->turn;
    walk->chunk_at = first;
    walk->chunk_end = end;
}

/* Changes `walk->bits` where one life alone came or went; returns it, or NO_LIFE. */
static life_t step_by_one(struct walk *walk, const struct holders *last, const struct holders *now)
{
    int tier = -1; /* the only one that holds these blocks */
    for (int each = 0; each < MEMORIES; each++)
        if (last->in[each] | now->in[each]) {
            if (tier >= 0)
                return NO_LIFE;
            tier = each;
        }
    if (tier < 0 || last->in[tier] == NO_SET)
        return NO_LIFE;
    life_t life = sets_difference(&walk->table->sets, last->in[tier], now->in[tier]);
    if (life >= walk->table->life_count)
        return NO_LIFE;
    walk->bits[life / 64] ^= 1ull << life % 64;
    return life;
}

/* Advances to the next block whose holders differ from those of the block before, and writes its holders to
 * `walk->bits`. Returns its position, or `walk->end` when there is none.
 */
static uint64_t walk_on(struct walk *walk)
{
    struct holders last = {{NO_SET}};
    if (walk->at > walk->chunk_at)
        last = walk->found[walk->at - 1 - walk->chunk_at];
    for (; walk->at < walk->end; walk->at++) {
        if (walk->at == walk->chunk_end)
            walk_look_up(walk);
        const struct holders *now = &walk->found[walk->at - walk->chunk_at];
        if (same(now, &last))
            continue;
        walk->changed = step_by_one(walk, &last, now);
        if (walk->changed != NO_LIFE)
            return walk->at++;
        memset(walk->bits, 0, table_words(walk->table) * sizeof *walk->bits);
        for (int tier = 0; tier < MEMORIES; tier++)
            if (now->in[tier])
                sets_add_to(&walk->table->sets, now->in[tier], walk->bits);
        return walk->at++;
    }
    return walk->end;
}

/* Writes `depth` for the rows of these lives of one word; returns their number. */
static uint32_t tell(const struct block_table *table, uint64_t lives, uint32_t word, size_t depth, int32_t *out,
                     uint32_t rows)
{
    uint32_t told = 0;
    for (; lives; lives &= lives - 1, told++) {
        uint32_t row = table->row_of[word * 64 + (uint32_t)__builtin_ctzll(lives)];
        if (row < rows)
            out[row] = (int32_t)depth;
    }
    return told;
}

void table_depths(struct block_table *table, const uint64_t *blocks, size_t count, int32_t *out, uint32_t rows)
{
    struct walk walk;
    uint64_t in[LIVES_MAX / 64 + 1];
    uint32_t words = table_words(table);
    memset(out, 0, rows * sizeof *out);
    walk_begin(&walk, table, blocks, 0, count);
    if (walk_on(&walk) != 0 || !count)
        return;
    uint32_t left = 0;
    for (uint32_t word = 0; word < words; word++) {
        in[word] = walk.bits[word] & ~table->dead[word];
        left += (uint32_t)__builtin_popcountll(in[word]);
    }
    for (size_t at; left && (at = walk_on(&walk)) < count;) {
        bool is_one = walk.changed != NO_LIFE;
        uint32_t first = is_one ? walk.changed / 64u : 0, end = is_one ? first + 1 : words;
        for (uint32_t word = first; word < end; word++) {
            left -= tell(table, in[word] & ~walk.bits[word], word, at, out, rows);
            in[word] &= walk.bits[word];
        }
    }
    for (uint32_t word = 0; left && word < words; word++)
        tell(table, in[word], word, count, out, rows);
}

/* ---- boundaries */

/* Whether the row of this life holds a block in a tier. */
static bool holds(struct block_table *table, int tier, uint64_t block, life_t life)
{
    set_t set = table->maps[tier].block_count ? map_get(&table->maps[tier], block) : 0;
    return set && sets_has(&table->sets, set, life);
}

static bool in_memory(struct block_table *table, uint64_t block, life_t life)
{
    for (int tier = 0; tier < MEMORIES; tier++)
        if (holds(table, tier, block, life))
            return true;
    return false;
}

/* Rows by what is known of their boundaries, as bits by life. */
struct waiting {
    uint64_t done[LIVES_MAX / 64 + 1];     /* they have one */
    uint64_t counting[LIVES_MAX / 64 + 1]; /* blocks of a window of theirs are being counted */
    int32_t *reach;     /* by row, in full-attention blocks */
    int32_t *counted;   /* by row; the boundary is in `out` meanwhile */
    uint32_t *reaching; /* by reach: number of rows without a boundary that hold any block of one */
    size_t furthest;    /* no row reaches further */
};

/* Where a model has full attention, rows without any are left out of `reaching`: most rows do not hold a prompt's first
 * block, and to look at each would take as long as the look-up.
 */
static void wait_for_all(const struct block_table *table, struct waiting *waiting, bool has_full, uint32_t rows)
{
    memset(waiting->done, 0, table_words(table) * sizeof *waiting->done);
    memset(waiting->counting, 0, table_words(table) * sizeof *waiting->counting);
    for (uint32_t row = 0; row < rows && row < table->rows; row++) {
        size_t reach = (size_t)waiting->reach[row];
        if (has_full && !reach)
            continue;
        life_t life = table->life_of[row];
        if (life == NO_LIFE || !table->lives[life].counts[BOUNDARY])
            continue;
        waiting->reaching[reach]++;
        waiting->furthest = reach > waiting->furthest ? reach : waiting->furthest;
    }
}

/* Windows that are being counted, of rows that lack the next block of theirs, do not reach far enough. */
static void give_up(const struct block_table *table, struct waiting *waiting, const uint64_t *having, int32_t *out)
{
    for (uint32_t word = 0; word < table_words(table); word++) {
        uint64_t lost = waiting->counting[word] & ~having[word];
        waiting->counting[word] &= having[word];
        for (; lost; lost &= lost - 1)
            out[table->row_of[word * 64 + (uint32_t)__builtin_ctzll(lost)]] = 0;
    }
}

/* Counts a block of the waiting rows that have it. It may be the last one of a boundary if full attention reaches that: with
 * whole blocks, or with a partial block that is named by the boundary's own hash.
 */
static void count_in(struct block_table *table, struct waiting *waiting, const uint64_t *having, uint64_t block,
                     size_t end, const struct boundaries *at, int32_t *out, uint32_t rows)
{
    size_t boundary = end > at->window_beyond ? end - at->window_beyond : 0, full = boundary + at->full_beyond;
    bool may_begin = boundary && boundary % at->step == 0, is_beyond = at->full_beyond || at->window_beyond;
    for (uint32_t word = 0, words = table_words(table); word < words; word++)
        for (uint64_t left = having[word] & ~waiting->done[word]; left; left &= left - 1) {
            uint64_t bit = left & -left;
            life_t life = (life_t)(word * 64 + (uint32_t)__builtin_ctzll(left));
            uint32_t row = table->row_of[life];
            if (row >= rows)
                continue;
            size_t reach = (size_t)waiting->reach[row];
            if (!(waiting->counting[word] & bit)) {
                if (!may_begin ||
                    (at->stride && (full / at->stride > reach || (full > reach * at->stride &&
                                                                  (is_beyond || !in_memory(table, block, life))))))
                    continue;
                if (at->is_narrow && !holds(table, BOUNDARY, block ^ NARROW_MARK, life))
                    continue;
                out[row] = (int32_t)boundary;
                waiting->counted[row] = 0;
                waiting->counting[word] |= bit;
            }
            if ((size_t)++waiting->counted[row] < at->window_blocks)
                continue;
            waiting->done[word] |= bit;
            waiting->counting[word] &= ~bit;
            if (reach || !at->stride)
                waiting->reaching[reach]--;
        }
}

void table_boundaries(struct block_table *table, const uint64_t *blocks, size_t count, const struct boundaries *at,
                      int32_t *out, uint32_t rows)
{
    struct waiting waiting;
    uint64_t having[LIVES_MAX / 64 + 1]; /* the rows that have the last block */
    uint32_t words = table_words(table);
    struct block_map *map = &table->maps[BOUNDARY];
    size_t stride = at->stride, window = at->window, whole = stride ? count / stride : 0;
    bool may_be_in_first = stride > 1 && !at->full_beyond && !at->window_beyond; /* a boundary in a partial block */
    memset(out, 0, rows * sizeof *out);
    if (!map->block_count || !rows || !count)
        return;
    waiting.reach = must(malloc((2 * (size_t)rows + whole + 1) * sizeof *waiting.reach));
    waiting.counted = waiting.reach + rows;
    waiting.reaching = (uint32_t *)waiting.counted + rows;
    waiting.furthest = 0;
    memset(waiting.reaching, 0, (whole + 1) * sizeof *waiting.reaching);
    if (stride == 1)
        table_depths(table, blocks, count, waiting.reach, rows);
    else if (whole) {
        uint64_t *strided = must(malloc(whole * sizeof *strided));
        for (size_t i = 0; i < whole; i++)
            strided[i] = blocks[(i + 1) * stride - 1];
        table_depths(table, strided, whole, waiting.reach, rows);
        free(strided);
    } else
        memset(waiting.reach, 0, rows * sizeof *waiting.reach);
    wait_for_all(table, &waiting, stride, rows);
    set_t before = 0;
    size_t fetched = SIZE_MAX; /* the blocks that end from here on are being prefetched */
    for (size_t end = count / window * window; end; end -= window) {
        while (waiting.furthest && !waiting.reaching[waiting.furthest])
            waiting.furthest--;
        size_t last = waiting.furthest * stride + stride - 1 + at->window_beyond;
        if (stride && end > last)
            end = last / window * window;
        if (!end || !(waiting.reaching[waiting.furthest] || may_be_in_first))
            break;
        for (fetched = fetched < end ? fetched : end + window; fetched > window && fetched + AHEAD * window > end;) {
            fetched -= window;
            map_prefetch(map, blocks[fetched - 1]);
        }
        set_t set = map_get(map, blocks[end - 1]);
        if (set != before) {
            memset(having, 0, words * sizeof *having);
            if (set)
                sets_add_to(&table->sets, set, having);
            for (uint32_t word = 0; word < words; word++)
                having[word] &= ~table->dead[word];
            give_up(table, &waiting, having, out);
            before = set;
        }
        if (set)
            count_in(table, &waiting, having, blocks[end - 1], end, at, out, rows);
    }
    for (uint32_t word = 0; at->short_by && word < words; word++)
        for (uint64_t left = waiting.counting[word]; left; left &= left - 1) {
            int32_t *boundary = &out[table->row_of[word * 64 + (uint32_t)__builtin_ctzll(left)]];
            *boundary = (size_t)*boundary > at->short_by ? *boundary - (int32_t)at->short_by : 0;
        }
    free(waiting.reach);
}

/* The lives of the allowed rows, as bits. */
static void lives_of(const struct block_table *table, const uint8_t *allowed, uint32_t rows, uint64_t *bits)
{
    memset(bits, 0, table_words(table) * sizeof *bits);
    for (uint32_t row = 0; row < rows && row < table->rows; row++)
        if (allowed[row] && table->life_of[row] != NO_LIFE)
            bits[table->life_of[row] / 64] |= 1ull << table->life_of[row] % 64;
}

static uint32_t lowest_row(const struct block_table *table, const uint64_t *bits)
{
    uint32_t lowest = UINT32_MAX;
    for (uint32_t word = 0; word < table_words(table); word++)
        for (uint64_t left = bits[word]; left; left &= left - 1) {
            uint32_t row = table->row_of[word * 64 + (uint32_t)__builtin_ctzll(left)];
            lowest = row < lowest ? row : lowest;
        }
    return lowest;
}

/* Sets `in` &= `bits` and returns true, unless the result is empty: then `in` is unchanged. */
static bool narrow(uint64_t *in, const uint64_t *bits, uint32_t words)
{
    uint64_t any = 0;
    for (uint32_t word = 0; word < words; word++)
        any |= in[word] & bits[word];
    for (uint32_t word = 0; any && word < words; word++)
        in[word] &= bits[word];
    return any != 0;
}

size_t table_cover(struct block_table *table, const uint64_t *blocks, size_t first, size_t end, const uint8_t *allowed,
                   uint32_t rows, struct source *sources)
{
    struct walk walk;
    uint64_t usable[LIVES_MAX / 64 + 1], in[LIVES_MAX / 64 + 1];
    uint32_t words = table_words(table);
    size_t found = 0, begin = first;
    lives_of(table, allowed, rows, usable);
    walk_begin(&walk, table, blocks, first, end);
    if (first >= end || walk_on(&walk) != first)
        return 0;
    memcpy(in, usable, words * sizeof *in);
    for (uint64_t at = first; narrow(in, walk.bits, words);) {
        for (at = walk_on(&walk); at < end && narrow(in, walk.bits, words);)
            at = walk_on(&walk);
        sources[found++] = (struct source){lowest_row(table, in), begin, at};
        if (at == end)
            break;
        begin = at;
        memcpy(in, usable, words * sizeof *in);
    }
    return found;
}
