/* Sets of holders, each stored once and shared by all blocks that have it.
 *
 * The blocks of a chain mostly have the same holders, so a block stores the number of a set and not the set. A set's
 * members are *lives*: small numbers that represent a worker between two clearings of its cache. Sets are counted by
 * reference (`sets_keep`, `sets_release`); number 0 is the empty set and always exists.
 */
#ifndef BATON_HOLDER_SETS_H
#define BATON_HOLDER_SETS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint16_t life_t;
typedef uint32_t set_t;

enum {
    LIVES_MAX = 65535,
    NO_LIFE = LIVES_MAX,
    SET_INLINE_MAX = 4,   /* members stored in the set itself */
    STEPS_KEPT = 1 << 12, /* entries of the cache of `sets_step` results */
    LINE_BYTES = 64,      /* of the processor's cache */
};

static const set_t NO_SET = UINT32_MAX; /* not the number of any set */

enum step { ADD = 0, TAKE = 1 };

struct holder_set {
    uint64_t hash;
    uint32_t refs;
    uint32_t version; /* number of earlier sets that had this number */
    union {
        life_t few[SET_INLINE_MAX];
        life_t *many;   /* sorted, when count > SET_INLINE_MAX */
        uint64_t *bits; /* when words > 0: where bits are smaller than a list */
    } as;
    uint16_t count;
    uint16_t words;
    set_t next; /* next set in the same hash bucket, or next free number */
};

struct step_kept {
    set_t from, to;
    uint32_t from_version, to_version;
    uint32_t what; /* life and step */
};

struct holder_sets {
    struct holder_set *sets;
    uint32_t used, room; /* numbers used so far, and the capacity of `sets` */
    uint32_t alive;
    set_t free;
    set_t *buckets;
    uint32_t bucket_mask;
    struct step_kept *steps;
    life_t *members;     /* scratch: the members of a set as a list */
    uint64_t *bits;      /* scratch: the same as bits */
    uint64_t bytes_many; /* memory outside of `sets` */
};

void *must(void *memory); /* ends the process when `memory` is NULL */

void sets_open(struct holder_sets *all);
void sets_close(struct holder_sets *all);
uint64_t sets_bytes(const struct holder_sets *all);

/* `set` with or without `life`; `set` itself when that changes nothing. A new set has no references yet. */
set_t sets_step(struct holder_sets *all, set_t set, life_t life, enum step step);
/* `set` without the lives in `gone` (a bit set of `words` words). */
set_t sets_without(struct holder_sets *all, set_t set, const uint64_t *gone, uint32_t words);
/* The life that only one of the sets has, if there is no other; else NO_LIFE. Sets are compared by their 64-bit hashes, as
 * blocks are: the members need not be read.
 */
life_t sets_difference(const struct holder_sets *all, set_t set, set_t other);
bool sets_has(const struct holder_sets *all, set_t set, life_t life);
/* Whether some member is not in `gone`. */
bool sets_beyond(const struct holder_sets *all, set_t set, const uint64_t *gone);
/* Adds the members to the bit set `bits`, which covers all lives in use. */
void sets_add_to(const struct holder_sets *all, set_t set, uint64_t *bits);
/* Starts to prefetch the members that are not in the set itself. */
void sets_fetch(const struct holder_set *one);
void sets_free(struct holder_sets *all, set_t set);

static inline void sets_keep(struct holder_sets *all, set_t set)
{
    all->sets[set].refs++;
}

static inline void sets_release(struct holder_sets *all, set_t set)
{
    if (--all->sets[set].refs == 0 && set != 0)
        sets_free(all, set);
}

#endif
