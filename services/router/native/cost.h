/* The cost model, as functions that are inlined: the shortlist computes with several rows at once, and keeps only what
 * it needs. See cost.py.
 */
#ifndef BATON_COST_H
#define BATON_COST_H

#include <math.h>

#include "placement.h"

#define INLINED __attribute__((always_inline)) static inline
#define N(what) fleet->numbers[(what) * fleet->stride + row]

INLINED bool flag(const struct fleet *fleet, enum flag what, size_t row)
{
    return fleet->flags[(size_t)what * fleet->stride + row];
}

INLINED double not_number(double one, double other, double result)
{
    result = isnan(other) ? other : result;
    return isnan(one) ? one : result;
}

INLINED double least(double one, double other, bool arrays)
{
    double result = other < one ? other : one;
    return arrays ? not_number(one, other, result) : result;
}

INLINED double most(double one, double other, bool arrays)
{
    double result = other > one ? other : one;
    return arrays ? not_number(one, other, result) : result;
}

INLINED int64_t block_size_of(double size)
{
    return size >= 1.0 ? (int64_t)fmin(size, 0x1p53) : 1;
}

/* The least of those of `count` numbers that are numbers, `count` a multiple of 8. */
INLINED double least_of(const double *numbers, size_t count)
{
    enum { LANES = 8 };
    double least[LANES];
    for (int lane = 0; lane < LANES; lane++)
        least[lane] = INFINITY;
    for (size_t i = 0; i < count; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            least[lane] = numbers[i + (size_t)lane] < least[lane] ? numbers[i + (size_t)lane] : least[lane];
    for (int lane = 1; lane < LANES; lane++)
        least[0] = least[lane] < least[0] ? least[lane] : least[0];
    return least[0];
}

struct batch {
    double between_s, step_s, itl_s, full_step_s, more_s, excess_s, disturbed, queue_s;
};

/* By how much the request slows each step of a batch. */
INLINED double more_s(const struct fleet *fleet, const struct question *question, size_t row)
{
    double tokens = (double)(question->tokens + (question->tokens_out >> 1));
    return N(DECODE_REQUEST_S) + N(DECODE_CONTEXT_TOKEN_S) * tokens;
}

INLINED double mean_token_s(const struct fleet *fleet, size_t row)
{
    double each_s = N(PREFILL_TOKEN_S) + N(PREFILL_PAIR_S) * N(PAIRS_PER_TOKEN);
    return each_s + N(PREFILL_STEP_S) / N(STEP_TOKENS);
}

INLINED double work_s(const struct fleet *fleet, size_t row, double computed, double cached)
{
    double pairs = computed * (cached + 0.5 * computed);
    return N(PREFILL_STEP_S) + N(PREFILL_TOKEN_S) * computed + N(PREFILL_PAIR_S) * pairs;
}

INLINED double waiting_s(const struct fleet *fleet, const struct question *question, size_t row, double token_s,
                        double step_s)
{
    double reported_s = (N(WAITING_TOKENS) - N(SENT_TOKENS)) * token_s;
    double elapsed_s = question->now - N(HEARD_AT);
    double left_s = most(reported_s - elapsed_s, 0.0, question->arrays) + N(SENT_TOKENS) * token_s;
    return most(left_s, 0.5 * step_s, question->arrays);
}

INLINED struct batch estimate_batch(const struct fleet *fleet, const struct question *question, size_t row)
{
    struct batch batch;
    double token_s = mean_token_s(fleet, row);
    double decoding = N(DECODING);
    batch.more_s = more_s(fleet, question, row);
    double step_s = N(DECODE_STEP_S) + N(DECODE_REQUEST_S) * decoding + N(DECODE_CONTEXT_TOKEN_S) * N(CONTEXT_TOKENS);
    batch.full_step_s = step_s + batch.more_s;
    batch.itl_s = batch.full_step_s / (1.0 - least(N(PROMPTS_PER_S) * token_s, BUSY_MAX, question->arrays));
    batch.excess_s = most(batch.full_step_s - question->itl_free_s, 0.0, question->arrays);
    batch.disturbed = batch.full_step_s > question->itl_free_s ? decoding * N(ANSWERS) : 0.0;
    batch.step_s = decoding > 0.0 ? step_s : 0.0;
    batch.between_s = batch.step_s / N(STEP_TOKENS);
    batch.queue_s = waiting_s(fleet, question, row, token_s + batch.between_s, batch.step_s);
    return batch;
}

INLINED double ttft_s(double queue_s, double fetch_s, double prefill_s)
{
    return queue_s + fetch_s + prefill_s;
}

/* What a worker would do of a request. Numbers of tokens are integers. */
struct estimate {
    double cached, fetched, computed;
    double queue_s, fetch_s, prefill_s, others_s;
    double handoff_s, decode_queue_s, kv_wait_s, decode_s, within_s, itl_s, step_s, first_s, decode_others_s;
    double cost_s[3]; /* by part */
};

/* Blocks of the prompt from its start, of so many tokens. `elsewhere`: most that any worker holds of whom this one can
 * fetch; itself, perhaps, of whom it then fetches nothing. `usable`: those that need not be computed.
 */
struct prefix {
    double held, elsewhere, usable, block_size;
};

INLINED struct prefix prefix_of(const struct fleet *fleet, const struct question *question,
                                const struct holders *holders, size_t row)
{
    int64_t block_size = block_size_of(N(BLOCK_SIZE));
    return (struct prefix){
        .held = (double)holders->blocks[row],
        .elsewhere = flag(fleet, EXCHANGES_KV, row) ? (double)most_blocks(holders, fleet->groups[row]) : 0.0,
        .usable = question->tokens > 0 ? (double)((question->tokens - 1) / block_size) : 0.0,
        .block_size = (double)block_size,
    };
}

INLINED void estimate_prefill(struct estimate *to, const struct fleet *fleet, const struct question *question,
                              size_t row, struct prefix prefix, const struct batch *batch)
{
    double tokens = (double)question->tokens;
    double held = (prefix.held < prefix.usable ? prefix.held : prefix.usable) * prefix.block_size;
    double reach = (prefix.elsewhere < prefix.usable ? prefix.elsewhere : prefix.usable) * prefix.block_size;
    double missing = reach - held;
    double alone_s = work_s(fleet, row, tokens - held, held);
    double reading_s = N(TRANSFER_BASE_S) + N(TRANSFER_TOKEN_S) * missing;
    double rest_s = work_s(fleet, row, tokens - reach, reach);
    bool fetches = (missing >= (double)question->fetch_tokens_min) & (reading_s + rest_s < alone_s);
    double own_s = fetches ? rest_s : alone_s;
    to->cached = held;
    to->fetched = fetches ? missing : 0.0;
    to->fetch_s = fetches ? reading_s : 0.0;
    to->computed = tokens - held - to->fetched;
    to->queue_s = batch->queue_s;
    to->prefill_s = own_s + to->computed * batch->between_s;
    double again_s = question->eviction_price * N(PREFILL_TOKEN_S) * (tokens - held);
    to->others_s = own_s * batch->disturbed + again_s;
}

INLINED void estimate_decode(struct estimate *to, const struct fleet *fleet, const struct question *question,
                             size_t row, const struct batch *batch)
{
    double missing = (double)question->tokens - to->cached, out = (double)question->tokens_out;
    double exposed = question->streams ? least(missing, N(STEP_TOKENS), question->arrays) : missing;
    to->handoff_s = N(TRANSFER_BASE_S) + N(TRANSFER_TOKEN_S) * exposed;
    to->decode_queue_s = batch->queue_s;
    to->decode_s = out * batch->itl_s;
    to->kv_wait_s = N(FREE_TOKENS) < (double)(question->tokens + question->tokens_out) ? to->decode_s : 0.0;
    to->within_s = to->decode_s - out * batch->excess_s;
    to->itl_s = batch->itl_s;
    to->step_s = batch->full_step_s;
    to->first_s = N(PREFILL_STEP_S) + N(PREFILL_TOKEN_S) * TAIL_TOKENS + batch->step_s;
    to->decode_others_s = out * batch->more_s * batch->disturbed;
}

INLINED struct estimate estimate(const struct fleet *fleet, const struct question *question, size_t row,
                                 struct prefix prefix)
{
    struct estimate to;
    struct batch batch = estimate_batch(fleet, question, row);
    estimate_prefill(&to, fleet, question, row, prefix, &batch);
    estimate_decode(&to, fleet, question, row, &batch);
    double prefill_s = ttft_s(to.queue_s, to.fetch_s, to.prefill_s) + to.others_s + N(TRANSIT_S);
    double rest_s = to.kv_wait_s + to.decode_s - to.within_s + to.decode_others_s;
    to.cost_s[PREFILL] = prefill_s;
    to.cost_s[DECODE] = to.handoff_s + to.decode_queue_s + to.first_s + N(TRANSIT_S) + rest_s;
    to.cost_s[WHOLE] = prefill_s + rest_s;
    return to;
}

#endif
