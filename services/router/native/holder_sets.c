#include "holder_sets.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *must(void *memory)
{
    if (memory == NULL) {
        fputs("baton: no memory left for the prefix index\n", stderr);
        abort();
    }
    return memory;
}

/* A pseudorandom number per life. A set's hash is the XOR of its members', so a step updates it in constant time. */
static uint64_t hash_of(life_t life)
{
    uint64_t mixed = (life + 1) * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
    return mixed ^ mixed >> 31;
}

/* The life with that hash, if it has one: `hash_of` step by step backwards. */
static uint64_t life_with(uint64_t hash)
{
    uint64_t mixed = (hash ^ hash >> 31 ^ hash >> 62) * 0x319642B2D24D8EC3u;
    mixed = (mixed ^ mixed >> 27 ^ mixed >> 54) * 0x96DE1B173F119089u;
    mixed = (mixed ^ mixed >> 30 ^ mixed >> 60) * 0xF1DE83E19937733Du;
    return mixed - 1;
}

life_t sets_difference(const struct holder_sets *all, set_t set, set_t other)
{
    const struct holder_set *one = &all->sets[set], *two = &all->sets[other];
    if (one->count + 1 != two->count && two->count + 1 != one->count)
        return NO_LIFE;
    uint64_t life = life_with(one->hash ^ two->hash);
    return life < LIVES_MAX ? (life_t)life : NO_LIFE;
}

void sets_open(struct holder_sets *all)
{
    memset(all, 0, sizeof *all);
    all->room = 64;
    all->sets = must(calloc(all->room, sizeof *all->sets));
    all->used = 1;
    all->sets[0].refs = 1;
    all->bucket_mask = 63;
    all->buckets = must(calloc(all->bucket_mask + 1, sizeof *all->buckets));
    all->steps = must(calloc(STEPS_KEPT, sizeof *all->steps));
    all->members = must(malloc((LIVES_MAX + 1) * sizeof *all->members));
    all->bits = must(malloc((LIVES_MAX / 64 + 1) * sizeof *all->bits));
}

void sets_close(struct holder_sets *all)
{
    for (set_t set = 1; set < all->used; set++) {
        struct holder_set *one = &all->sets[set];
        if (one->words || one->count > SET_INLINE_MAX)
            free(one->as.many);
    }
    free(all->sets);
    free(all->buckets);
    free(all->steps);
    free(all->members);
    free(all->bits);
}

uint64_t sets_bytes(const struct holder_sets *all)
{
    return all->bytes_many + all->room * sizeof *all->sets + (all->bucket_mask + 1ull) * sizeof *all->buckets +
           STEPS_KEPT * sizeof *all->steps;
}

/* Members in ascending order, of a set that is not stored as bits. */
static const life_t *sorted(const struct holder_set *one)
{
    return one->count > SET_INLINE_MAX ? one->as.many : one->as.few;
}

/* Bytes that a set's members take outside of `struct holder_set`. */
static size_t bytes_outside(uint32_t count, uint32_t words)
{
    if (words)
        return words * sizeof(uint64_t);
    return count > SET_INLINE_MAX ? count * sizeof(life_t) : 0;
}

/* Writes the members in ascending order; returns their number. */
static uint32_t write_out(const struct holder_set *one, life_t *members)
{
    if (!one->words) {
        memcpy(members, sorted(one), one->count * sizeof *members);
        return one->count;
    }
    uint32_t count = 0;
    for (uint32_t word = 0; word < one->words; word++)
        for (uint64_t left = one->as.bits[word]; left; left &= left - 1)
            members[count++] = (life_t)(word * 64 + __builtin_ctzll(left));
    return count;
}

static void widen_buckets(struct holder_sets *all)
{
    uint32_t mask = all->bucket_mask * 2 + 1;
    free(all->buckets);
    all->buckets = must(calloc(mask + 1ull, sizeof *all->buckets));
    all->bucket_mask = mask;
    for (set_t set = 1; set < all->used; set++) {
        struct holder_set *one = &all->sets[set];
        if (one->count) {
            one->next = all->buckets[one->hash & mask];
            all->buckets[one->hash & mask] = set;
        }
    }
}

static set_t take_number(struct holder_sets *all)
{
    if (all->free) {
        set_t set = all->free;
        all->free = all->sets[set].next;
        return set;
    }
    if (all->used == all->room) {
        all->room += all->room / 2;
        all->sets = must(realloc(all->sets, all->room * sizeof *all->sets));
        memset(all->sets + all->used, 0, (all->room - all->used) * sizeof *all->sets);
    }
    return all->used++;
}

/* The set with these (sorted) members. Each content has only one form, so equal sets have equal bytes. */
static set_t find_or_make(struct holder_sets *all, uint64_t hash, const life_t *members, uint32_t count)
{
    if (!count)
        return 0;
    uint32_t words = members[count - 1] / 64u + 1;
    const void *content = members;
    if (count <= SET_INLINE_MAX || count * sizeof(life_t) <= words * sizeof(uint64_t))
        words = 0;
    else {
        memset(all->bits, 0, words * sizeof *all->bits);
        for (uint32_t i = 0; i < count; i++)
            all->bits[members[i] / 64u] |= 1ull << members[i] % 64u;
        content = all->bits;
    }
    size_t outside = bytes_outside(count, words);
    for (set_t set = all->buckets[hash & all->bucket_mask]; set; set = all->sets[set].next) {
        const struct holder_set *one = &all->sets[set];
        if (one->hash != hash || one->count != count || one->words != words)
            continue;
        if (!memcmp(outside ? (const void *)one->as.many : one->as.few, content, outside ? outside : count * sizeof(life_t)))
            return set;
    }
    if (all->alive++ > all->bucket_mask)
        widen_buckets(all);
    set_t set = take_number(all);
    struct holder_set *one = &all->sets[set];
    one->hash = hash;
    one->count = (uint16_t)count;
    one->words = (uint16_t)words;
    one->next = all->buckets[hash & all->bucket_mask];
    all->buckets[hash & all->bucket_mask] = set;
    if (outside) {
        one->as.many = memcpy(must(malloc(outside)), content, outside);
        all->bytes_many += outside;
    } else
        memcpy(one->as.few, content, count * sizeof(life_t));
    return set;
}

void sets_free(struct holder_sets *all, set_t set)
{
    struct holder_set *one = &all->sets[set];
    set_t *place = &all->buckets[one->hash & all->bucket_mask];
    while (*place != set)
        place = &all->sets[*place].next;
    *place = one->next;
    size_t outside = bytes_outside(one->count, one->words);
    if (outside)
        free(one->as.many);
    all->bytes_many -= outside;
    all->alive--;
    one->count = one->words = 0;
    one->version++;
    one->next = all->free;
    all->free = set;
}

static set_t make_step(struct holder_sets *all, set_t set, life_t life, enum step step)
{
    if (sets_has(all, set, life) == (step == ADD))
        return set;
    life_t *members = all->members;
    uint32_t count = write_out(&all->sets[set], members), at = 0;
    while (at < count && members[at] < life)
        at++;
    size_t after = (count - at) * sizeof *members;
    if (step == ADD) {
        memmove(members + at + 1, members + at, after);
        members[at] = life;
        count++;
    } else {
        memmove(members + at, members + at + 1, after - sizeof *members);
        count--;
    }
    return find_or_make(all, all->sets[set].hash ^ hash_of(life), members, count);
}

set_t sets_step(struct holder_sets *all, set_t set, life_t life, enum step step)
{
    uint32_t what = life | (uint32_t)step << 16;
    struct step_kept *kept = &all->steps[(set * 0x9E3779B1u ^ what * 0x85EBCA6Bu) >> 20 & (STEPS_KEPT - 1)];
    if (kept->from == set && kept->what == what && kept->from_version == all->sets[set].version &&
        kept->to_version == all->sets[kept->to].version && (set | kept->to))
        return kept->to;
    set_t to = make_step(all, set, life, step);
    *kept = (struct step_kept){set, to, all->sets[set].version, all->sets[to].version, what};
    return to;
}

set_t sets_without(struct holder_sets *all, set_t set, const uint64_t *gone, uint32_t words)
{
    life_t *members = all->members;
    uint32_t count = write_out(&all->sets[set], members), left = 0;
    uint64_t hash = all->sets[set].hash;
    for (uint32_t i = 0; i < count; i++) {
        life_t life = members[i];
        if (life / 64u < words && gone[life / 64u] >> life % 64u & 1)
            hash ^= hash_of(life);
        else
            members[left++] = life;
    }
    return left == count ? set : find_or_make(all, hash, members, left);
}

bool sets_has(const struct holder_sets *all, set_t set, life_t life)
{
    const struct holder_set *one = &all->sets[set];
    if (one->words)
        return life / 64u < one->words && one->as.bits[life / 64u] >> life % 64u & 1;
    const life_t *members = sorted(one);
    for (uint32_t i = 0; i < one->count; i++)
        if (members[i] == life)
            return true;
    return false;
}

bool sets_beyond(const struct holder_sets *all, set_t set, const uint64_t *gone)
{
    const struct holder_set *one = &all->sets[set];
    for (uint32_t word = 0; word < one->words; word++)
        if (one->as.bits[word] & ~gone[word])
            return true;
    const life_t *members = sorted(one);
    for (uint32_t i = 0; !one->words && i < one->count; i++)
        if (!(gone[members[i] / 64u] >> members[i] % 64u & 1))
            return true;
    return false;
}

void sets_add_to(const struct holder_sets *all, set_t set, uint64_t *bits)
{
    const struct holder_set *one = &all->sets[set];
    for (uint32_t word = 0; word < one->words; word++)
        bits[word] |= one->as.bits[word];
    const life_t *members = sorted(one);
    for (uint32_t i = 0; !one->words && i < one->count; i++)
        bits[members[i] / 64u] |= 1ull << members[i] % 64u;
}

void sets_fetch(const struct holder_set *one)
{
    size_t bytes = bytes_outside(one->count, one->words);
    for (size_t at = 0; at < bytes; at += LINE_BYTES)
        __builtin_prefetch((const char *)one->as.many + at);
}
