/* The predicted cost of each candidate for a request, and the choice among them. What is computed, and why, is written in
 * specification.py: choices are equal, and numbers to 1e-9. Formulas have its order of operations, and the compiler must
 * not contract them (-ffp-contract=off): so a replay repeats on every machine.
 */
#ifndef BATON_PLACEMENT_H
#define BATON_PLACEMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Columns of `numbers` and rows of `flags`, as in fleet_table.py; a test compares the names. */
#define NUMBER_NAMES(X)                                                                                              \
    X(LEGS_MAX) X(LAST_CHOSEN) X(BLOCK_SIZE) X(STEP_TOKENS) X(ANSWERS) X(HANDED_OVER_MIN) X(DROPPED_TOKENS) X(HEARD_AT) X(PROMPTS_PER_S) X(EVICTED_BLOCKS)   \
    X(RESTORED_BLOCKS) X(LEGS) X(DECODING) X(WAITING_TOKENS) X(CONTEXT_TOKENS) X(FREE_TOKENS) X(SENT_TOKENS)               \
    X(PREFILL_STEP_S) X(PREFILL_TOKEN_S) X(PREFILL_PAIR_S) X(DECODE_STEP_S) X(DECODE_REQUEST_S) X(DECODE_CONTEXT_TOKEN_S) X(TRANSFER_BASE_S)               \
    X(TRANSFER_TOKEN_S) X(PAIRS_PER_TOKEN) X(TRANSIT_S) X(PROMPTS_MEASURED)
#define FLAG_NAMES(X) X(READY) X(PREFILLS) X(DECODES) X(EXCHANGES_KV) X(ATTACHED) X(SERVES)
#define AS_ENTRY(name) name,
enum number { NUMBER_NAMES(AS_ENTRY) NUMBERS };
enum flag { FLAG_NAMES(AS_ENTRY) FLAGS };

/* The rest of the header is as in specification.py. */
enum { SOURCES_MAX = 2 };
enum mode { AUTO, AGGREGATED, DISAGGREGATED, DECODE_FIRST, MODES };
enum option { STREAMS = 1, UNSPLITTABLE = 2, HIT_THRESHOLD = 4, MAY_DECODE_FIRST = 8, PREFILL_NAMED = 16, SHORT = 32 };
enum role { PREFILL_ROLE = 1, DECODE_ROLE = 2, ALONE_ROLE = 4, ANSWER_ROLE = 8, BOTH_ROLE = 16, FIT = 32, FREE = 64, FULL = 128, RECEIVER_ROLE = 256 };
enum part { PREFILL, DECODE, WHOLE, PARTS };
enum why { ASKED_FOR, ALONE_ASKED_FOR, BEST_FOR_BOTH, ROLE_MISSING, APART, NOTHING_TO_HAND_OVER };

/* By row, 1 or 0: the worker offers the model; the request does not exclude it; the client lets it serve the part. */
struct masks {
    const uint8_t *offering, *allowed, *may_prefill, *may_answer;
    bool prefill_named, answer_named; /* the client names the only worker that may serve the part */
};

struct question {
    int64_t tokens, tokens_out, fetch_tokens_min;
    double now, ttft_target_s, itl_target_s, tie_s; /* targets are infinite where there is none */
    double decode_first_share_min;
    int mode, options;
};

/* A worker that can be asked for KV. */
struct holder {
    int64_t group, blocks, row;
};

struct estimate {
    int64_t cached, fetched, computed; /* tokens */
    double queue_s, fetch_s, prefill_s, prefill_others_s;
    double handoff_s, kv_wait_s, decode_s, within_s, itl_s, step_s, first_s, decode_others_s;
    double cost_s[PARTS];
};

struct candidate {
    int64_t roles, group;
    struct estimate of;
    double legs, last_chosen, transit_s, leg_transit_s;
};

/* Indices of candidates; -1: none. One worker serves all of the request when there is no `prefill`. */
struct choice {
    int prefill, decode;
    enum why why;
    bool has_pair; /* a pair was possible */
};

/* The fleet table, `numbers[what * stride + row]`, `flags[what * stride + row]`, and memory for all rows. */
struct fleet {
    const double *numbers;
    const uint8_t *flags;
    const int64_t *groups; /* of the request's model */
    size_t stride, count;
    uint8_t *roles;         /* bits of `enum role`, except ALONE_ROLE, BOTH_ROLE and RECEIVER_ROLE */
    uint8_t *sources;       /* rows that may be asked for KV */
    int32_t *blocks;        /* of the prompt from its start, on each row */
    const int32_t *in_use;  /* the part of `blocks` that requests hold which run there */
    struct holder *holders; /* by group, then most blocks, then row */
    size_t holder_count;
    double *costs_s; /* for four times as many as there are rows */
    size_t *chosen;  /* rows of the candidates */
};

/* Fills `roles` and `sources`; returns how many workers are free, -1 when none could serve the request, full or not. */
long find_rows(const struct fleet *fleet, const struct masks *masks, double heard_min);
/* Whether a free worker that holds a part of the prompt has too little free KV for all of it. */
bool lacks_room(const struct fleet *fleet, const struct question *question);
/* Fills `holders`. */
void find_holders(struct fleet *fleet, const struct question *question);
/* Fills `chosen` and `candidates`; returns their number. */
int find_candidates(struct fleet *fleet, const struct question *question, struct candidate *candidates);
struct choice choose(const struct candidate *candidates, int count, const struct question *question);
/* The rows to ask for KV that the candidate on `row` should fetch, with the block to stop before; returns how many. */
int find_sources(const struct fleet *fleet, const struct question *question, const struct candidate *candidate,
                 size_t row, struct holder found[SOURCES_MAX]);

#endif
