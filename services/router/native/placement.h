/* The predicted cost of each candidate for a request, and the choice among them.
 *
 * cost.py, evaluation.py and placer.py are the specification: the results are the same to the last bit. Therefore each
 * formula has their order of operations, and the compiler must not contract them (-ffp-contract=off).
 */
#ifndef BATON_PLACEMENT_H
#define BATON_PLACEMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Rows are computed with the instructions that a machine has for several numbers at once. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_MACHINE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_MACHINE
#endif

/* Columns of `numbers` and rows of `flags`, as in fleet_table.py; a test compares the names. */
#define NUMBER_NAMES(X)                                                                                              \
    X(LEGS_MAX) X(LAST_CHOSEN) X(BLOCK_SIZE) X(STEP_TOKENS) X(ANSWERS) X(HEARD_AT) X(PROMPTS_PER_S) X(STORED_TOKENS)   \
    X(USED_TOKENS) X(LEGS) X(DECODING) X(WAITING_TOKENS) X(CONTEXT_TOKENS) X(FREE_TOKENS) X(SENT_TOKENS)               \
    X(PREFILL_STEP_S) X(PREFILL_TOKEN_S) X(PREFILL_PAIR_S) X(DECODE_STEP_S) X(DECODE_REQUEST_S) X(DECODE_CONTEXT_TOKEN_S) X(TRANSFER_BASE_S)               \
    X(TRANSFER_TOKEN_S) X(PAIRS_PER_TOKEN) X(TRANSIT_S)
#define FLAG_NAMES(X) X(READY) X(PREFILLS) X(DECODES) X(EXCHANGES_KV) X(ATTACHED) X(SERVES)
#define AS_ENTRY(name) name,
enum number { NUMBER_NAMES(AS_ENTRY) NUMBERS };
enum flag { FLAG_NAMES(AS_ENTRY) FLAGS };

enum {
    RANKED_MAX = 8,  /* as in kv_sources.py */
    SOURCES_MAX = 2,
    TAIL_TOKENS = 16, /* as in cost.py */
    SHORTLISTED = 4,  /* as in shortlist.py */
    TOGETHER = 64,    /* rows that are computed before they are compared or added */
};
#define BUSY_MAX 0.9
#define UNCROWDED 5.0
#define NEVER_S 1e9 /* as in shortlist.py */
#define HIT_SHARE_OF_DECODE_FIRST 0.5 /* as in placer.py */

/* The fleet table: `numbers[what * stride + row]`, `flags[what * stride + row]`. */
struct fleet {
    const double *numbers;
    const uint8_t *flags;
    const int64_t *groups; /* of the request's model */
    size_t stride, count;
};

enum mode { AUTO, AGGREGATED, DISAGGREGATED, DECODE_FIRST };

/* What the cost and the choice depend on. */
struct question {
    int64_t tokens, tokens_out, fetch_tokens_min;
    double now, ttft_target_s, itl_target_s; /* infinite: no target */
    double eviction_price;
    double itl_free_s; /* a decode step that costs nothing */
    double tie_s;
    enum mode mode;
    bool streams, unsplittable, has_hit_threshold, may_decode_first;
    bool arrays; /* minimum and maximum treat NaN as numpy does, not as Python */
};

/* A worker that can be asked for KV. */
struct holder {
    int64_t group, blocks, row;
};

/* Of one prompt, ordered by group, then by most blocks, then by row. */
struct holders {
    struct holder *ranked;
    size_t count;
    const int32_t *blocks; /* of each row: blocks of the prompt from its start */
};

enum { PREFILLS_BIT = 1, DECODES_BIT = 2, ALONE_BIT = 4 };

/* The estimates and the numbers of the table are in the order of their types in Python: see `unpack` in compiled.py. */
struct candidate {
    int64_t bits, group;
    int64_t cached, fetched, computed;
    double queue_s, fetch_s, prefill_s, others_s;
    double handoff_s, decode_queue_s, kv_wait_s, decode_s, within_s, itl_s, step_s, first_s, decode_others_s;
    double cost_s[3]; /* by part */
    double legs, last_chosen, transit_s;
};

enum part { PREFILL, DECODE, WHOLE };
enum why { ASKED_FOR, ALONE_ASKED_FOR, BEST_FOR_BOTH, ROLE_MISSING, APART }; /* as `WHY` in compiled.py */

/* Indices of candidates; -1: none. One worker serves all of the request when there is no `prefill`. */
struct choice {
    int prefill, decode;
    enum why why;
    bool has_pair; /* a pair was possible */
};

void holders_rank(struct holders *holders);
/* Blocks that a holder of the group has, at most. */
int64_t most_blocks(const struct holders *holders, int64_t group);
/* Without a target: the decode step that costs nothing. */
double uncrowded_itl_s(const struct fleet *fleet, const struct question *question, const uint8_t *is_free);
/* What a token costs that another one evicts, in tokens computed again. */
double eviction_price(const struct fleet *fleet, const uint8_t *is_free);
struct candidate evaluate(const struct fleet *fleet, const struct question *question, const struct holders *holders,
                          size_t row);
/* The cheapest free rows of each group for each part, into `chosen`, which has room for all; returns how many.
 * `costs_s`: scratch memory for three times as many costs as there are rows.
 */
size_t shortlist(const struct fleet *fleet, const struct question *question, const struct holders *holders,
                 const uint8_t *is_free, size_t *chosen, double *costs_s);
struct choice choose(const struct candidate *candidates, int count, const struct question *question);
/* The rows to ask for KV that the candidate on `row` should fetch, with the block to stop before; returns how many. */
int find_sources(const struct fleet *fleet, const struct question *question, const struct holders *holders,
                 const struct candidate *candidate, size_t row, struct holder found[SOURCES_MAX]);

#endif
