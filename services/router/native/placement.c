#include "placement.h"

#include <math.h>
#include <stdlib.h>

#define N(what) fleet->numbers[row * NUMBERS + (what)]

static bool flag(const struct fleet *fleet, enum flag what, size_t row)
{
    return fleet->flags[(size_t)what * fleet->stride + row];
}

static double least(double one, double other, bool arrays)
{
    if (arrays && (isnan(one) || isnan(other)))
        return isnan(one) ? one : other;
    return other < one ? other : one;
}

static double most(double one, double other, bool arrays)
{
    if (arrays && (isnan(one) || isnan(other)))
        return isnan(one) ? one : other;
    return other > one ? other : one;
}

static int64_t block_size_of(const struct fleet *fleet, size_t row)
{
    double size = N(BLOCK_SIZE);
    return size >= 1.0 ? (int64_t)fmin(size, 0x1p53) : 1;
}

/* ---- holders: kv_sources.py */

static int by_rank(const void *left, const void *right)
{
    const struct holder *one = left, *other = right;
    if (one->group != other->group)
        return one->group < other->group ? -1 : 1;
    if (one->blocks != other->blocks)
        return one->blocks > other->blocks ? -1 : 1;
    return one->row < other->row ? -1 : one->row > other->row;
}

/* The first of each group are enough. Mostly all are of one group, in which these few are found faster than by sorting. */
void holders_rank(struct holders *holders)
{
    struct holder *ranked = holders->ranked;
    for (size_t i = 1; i < holders->count; i++)
        if (ranked[i].group != ranked[0].group) {
            qsort(ranked, holders->count, sizeof *ranked, by_rank);
            return;
        }
    size_t kept = 0;
    for (size_t i = 0; i < holders->count; i++) {
        struct holder one = ranked[i];
        if (kept == RANKED_MAX && by_rank(&one, &ranked[kept - 1]) > 0)
            continue;
        size_t at = kept < RANKED_MAX ? kept++ : kept - 1;
        for (; at > 0 && by_rank(&one, &ranked[at - 1]) < 0; at--)
            ranked[at] = ranked[at - 1];
        ranked[at] = one;
    }
    holders->count = kept;
}

/* The first of a group, or the first of the next group. */
static size_t first_of(const struct holders *holders, int64_t group)
{
    size_t low = 0, high = holders->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (holders->ranked[middle].group < group)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* What the last row had: most rows have the same block size and are of the same group, and a division takes as long as
 * ten other operations.
 */
struct last {
    double size; /* not a number: none */
    int64_t block_size, usable; /* blocks of the prompt that need not be computed */
    bool has_group;
    int64_t group;
    struct holder best, second; /* of the group; no blocks where there is none */
};

static void take_block_size(struct last *last, const struct fleet *fleet, const struct question *question, size_t row)
{
    if (N(BLOCK_SIZE) == last->size)
        return;
    last->size = N(BLOCK_SIZE);
    last->block_size = block_size_of(fleet, row);
    last->usable = question->tokens > 0 ? (question->tokens - 1) / last->block_size : 0;
}

static void take_group(struct last *last, const struct holders *holders, int64_t group)
{
    if (last->has_group && last->group == group)
        return;
    struct holder none = {group, 0, -1};
    size_t i = first_of(holders, group);
    last->has_group = true;
    last->group = group;
    last->best = i < holders->count && holders->ranked[i].group == group ? holders->ranked[i] : none;
    last->second = i + 1 < holders->count && holders->ranked[i + 1].group == group ? holders->ranked[i + 1] : none;
}

static int64_t held_by(const struct last *last, const struct holders *holders, size_t row)
{
    if (holders->blocks == NULL)
        return 0;
    return (holders->blocks[row] < last->usable ? holders->blocks[row] : last->usable) * last->block_size;
}

static int64_t reachable_by(const struct last *last, const struct question *question, size_t row, int64_t held)
{
    int64_t blocks = last->best.row != (int64_t)row ? last->best.blocks : last->second.blocks;
    int64_t reach = (blocks < last->usable ? blocks : last->usable) * last->block_size;
    return reach - held >= question->fetch_tokens_min ? reach : held;
}

int find_sources(const struct fleet *fleet, const struct question *question, const struct holders *holders,
                 const struct candidate *candidate, size_t row, struct holder found[SOURCES_MAX])
{
    int64_t block_size = block_size_of(fleet, row), first = candidate->cached / block_size;
    int64_t last = (candidate->cached + candidate->fetched) / block_size;
    size_t begin = first_of(holders, candidate->group);
    int count = 0;
    for (size_t i = begin; i < holders->count && i < begin + RANKED_MAX; i++) {
        struct holder one = holders->ranked[i];
        one.blocks = one.blocks < last ? one.blocks : last;
        if (one.group != candidate->group || count == SOURCES_MAX ||
            (one.blocks - first) * block_size < question->fetch_tokens_min)
            break;
        if (one.row != (int64_t)row)
            found[count++] = one;
    }
    return count;
}

/* ---- the cost model: cost.py */

struct batch {
    double between_s, step_s, itl_s, full_step_s, more_s, excess_s, disturbed, queue_s;
};

/* By how much the request slows each step of a batch. */
static double more_s(const struct fleet *fleet, const struct question *question, size_t row)
{
    double tokens = (double)(question->tokens + (question->tokens_out >> 1));
    return N(DECODE_REQUEST_S) + N(DECODE_CONTEXT_TOKEN_S) * tokens;
}

double uncrowded_itl_s(const struct fleet *fleet, const struct question *question, const uint8_t *is_free)
{
    double least_s = INFINITY;
    for (size_t row = 0; row < fleet->count; row++) {
        if (!is_free[row] || !flag(fleet, DECODES, row))
            continue;
        double alone_s = N(DECODE_STEP_S) + more_s(fleet, question, row);
        least_s = alone_s < least_s ? alone_s : least_s;
    }
    return UNCROWDED * (least_s + 0.0);
}

static double mean_token_s(const struct fleet *fleet, size_t row)
{
    double each_s = N(PREFILL_TOKEN_S) + N(PREFILL_PAIR_S) * N(PAIRS_PER_TOKEN);
    return each_s + N(PREFILL_STEP_S) / N(STEP_TOKENS);
}

double eviction_price(const struct fleet *fleet, const struct question *question, const uint8_t *is_free)
{
    double stored = 0.0, used = 0.0, busy = 0.0, count = 0.0;
    for (size_t row = 0; row < fleet->count; row++) {
        if (!is_free[row] || !flag(fleet, PREFILLS, row))
            continue;
        stored += N(STORED_TOKENS);
        used += N(USED_TOKENS);
        busy += least(N(PROMPTS_PER_S) * mean_token_s(fleet, row), BUSY_MAX, question->arrays);
        count += 1.0;
    }
    if (!(used > 0.0 && stored > 0.0))
        return 0.0;
    double reused = used / stored;
    return (reused < 1.0 ? reused : 1.0) / (1.0 - busy / count);
}

static double work_s(const struct fleet *fleet, size_t row, double computed, double cached)
{
    double pairs = computed * (cached + 0.5 * computed);
    return N(PREFILL_STEP_S) + N(PREFILL_TOKEN_S) * computed + N(PREFILL_PAIR_S) * pairs;
}

static double waiting_s(const struct fleet *fleet, const struct question *question, size_t row, double token_s,
                        double step_s)
{
    double reported_s = (N(WAITING_TOKENS) - N(SENT_TOKENS)) * token_s;
    double elapsed_s = question->now - N(HEARD_AT);
    double left_s = most(reported_s - elapsed_s, 0.0, question->arrays) + N(SENT_TOKENS) * token_s;
    return most(left_s, 0.5 * step_s, question->arrays);
}

__attribute__((always_inline)) static inline struct batch estimate_batch(const struct fleet *fleet, const struct question *question, size_t row)
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

static void estimate_prefill(struct candidate *to, const struct fleet *fleet, const struct question *question,
                             size_t row, int64_t reachable, const struct batch *batch)
{
    int64_t held = to->cached, missing = reachable - held;
    double own_s = work_s(fleet, row, (double)(question->tokens - held), (double)held);
    if (missing > 0) {
        double reading_s = N(TRANSFER_BASE_S) + N(TRANSFER_TOKEN_S) * (double)missing;
        double rest_s = work_s(fleet, row, (double)(question->tokens - reachable), (double)reachable);
        if (reading_s + rest_s < own_s) {
            own_s = rest_s;
            to->fetched = missing;
            to->fetch_s = reading_s;
        }
    }
    to->computed = question->tokens - held - to->fetched;
    to->queue_s = batch->queue_s;
    to->prefill_s = own_s + (double)to->computed * batch->between_s;
    double again_s = question->eviction_price * N(PREFILL_TOKEN_S) * (double)(question->tokens - held);
    to->others_s = own_s * batch->disturbed + again_s;
}

static void estimate_decode(struct candidate *to, const struct fleet *fleet, const struct question *question,
                            size_t row, const struct batch *batch)
{
    double missing = (double)(question->tokens - to->cached), out = (double)question->tokens_out;
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

static double ttft_s(const struct candidate *candidate)
{
    return candidate->queue_s + candidate->fetch_s + candidate->prefill_s;
}

static void estimate_cost(struct candidate *to, const struct fleet *fleet, size_t row)
{
    double prefill_s = ttft_s(to) + to->others_s + N(TRANSIT_S);
    double rest_s = to->kv_wait_s + to->decode_s - to->within_s + to->decode_others_s;
    to->cost_s[PREFILL] = prefill_s;
    to->cost_s[DECODE] = to->handoff_s + to->decode_queue_s + to->first_s + N(TRANSIT_S) + rest_s;
    to->cost_s[WHOLE] = prefill_s + rest_s;
}

/* ---- candidates: evaluation.py and placer.py */

/* Whether the worker may serve the request without a prefill worker. */
static bool may_serve_alone(const struct candidate *candidate, const struct fleet *fleet,
                            const struct question *question, size_t row)
{
    if (flag(fleet, ATTACHED, row))
        return question->mode != DECODE_FIRST;
    if (question->mode != DECODE_FIRST) {
        if (candidate->bits & PREFILLS_BIT)
            return true;
        if (question->has_hit_threshold)
            return false;
    }
    double hit = (double)(candidate->cached + candidate->fetched);
    bool has_most = hit >= HIT_SHARE_OF_DECODE_FIRST * (double)question->tokens;
    return question->may_decode_first && has_most && flag(fleet, EXCHANGES_KV, row) &&
           (double)candidate->computed <= N(STEP_TOKENS);
}

/* Inlined, so that the shortlist computes and stores only what it needs. */
__attribute__((always_inline)) static inline struct candidate
estimate(const struct fleet *fleet, const struct question *question, const struct holders *holders, struct last *last,
         size_t row)
{
    struct candidate candidate = {.group = fleet->groups[row]};
    struct batch batch = estimate_batch(fleet, question, row);
    take_block_size(last, fleet, question, row);
    int64_t held = candidate.cached = held_by(last, holders, row), reachable = held;
    if (flag(fleet, EXCHANGES_KV, row)) {
        take_group(last, holders, candidate.group);
        reachable = reachable_by(last, question, row, held);
    }
    estimate_prefill(&candidate, fleet, question, row, reachable, &batch);
    estimate_decode(&candidate, fleet, question, row, &batch);
    estimate_cost(&candidate, fleet, row);
    return candidate;
}

struct candidate evaluate(const struct fleet *fleet, const struct question *question, const struct holders *holders,
                          size_t row)
{
    struct last last = {.size = NAN};
    struct candidate candidate = estimate(fleet, question, holders, &last, row);
    candidate.legs = N(LEGS);
    candidate.last_chosen = N(LAST_CHOSEN);
    candidate.transit_s = N(TRANSIT_S);
    candidate.bits = (flag(fleet, PREFILLS, row) ? PREFILLS_BIT : 0) | (flag(fleet, DECODES, row) ? DECODES_BIT : 0);
    if (candidate.bits & DECODES_BIT && may_serve_alone(&candidate, fleet, question, row))
        candidate.bits |= ALONE_BIT;
    return candidate;
}

static bool is_late(const struct candidate *candidate, const struct question *question)
{
    return ttft_s(candidate) > question->ttft_target_s;
}

static bool is_slow(const struct candidate *candidate, const struct question *question)
{
    return candidate->step_s > question->itl_target_s;
}

static bool meets(const struct candidate *candidate, const struct question *question, enum part part)
{
    return !(part != DECODE && is_late(candidate, question)) && !(part != PREFILL && is_slow(candidate, question));
}

/* ---- the shortlist: shortlist.py */

/* The costs of a row for the shortlist: one that misses a target comes after all that meet them. */
static void shortlist_costs(const struct candidate *candidate, const struct question *question, double cost_s[3])
{
    double late_s = is_late(candidate, question) ? NEVER_S : 0.0, slow_s = is_slow(candidate, question) ? NEVER_S : 0.0;
    cost_s[PREFILL] = candidate->cost_s[PREFILL] + late_s;
    cost_s[DECODE] = candidate->cost_s[DECODE] + slow_s;
    cost_s[WHOLE] = candidate->cost_s[WHOLE] + late_s + slow_s;
}

/* The cheapest rows so far, in order; among equals the first. */
struct few {
    int count;
    size_t rows[SHORTLISTED];
    double costs_s[SHORTLISTED];
};

/* Costs that are not numbers come last, as numpy sorts them. */
static bool is_cheaper(double one_s, double other_s)
{
    return one_s < other_s || (isnan(other_s) && !isnan(one_s));
}

static void few_add(struct few *few, size_t row, double cost_s)
{
    int at = few->count;
    if (at == SHORTLISTED && !is_cheaper(cost_s, few->costs_s[SHORTLISTED - 1]))
        return;
    if (at == SHORTLISTED)
        at--;
    else
        few->count++;
    for (; at > 0 && is_cheaper(cost_s, few->costs_s[at - 1]); at--) {
        few->rows[at] = few->rows[at - 1];
        few->costs_s[at] = few->costs_s[at - 1];
    }
    few->rows[at] = row;
    few->costs_s[at] = cost_s;
}

/* Lists of one group: for prefill, for decode, for both on a worker that decodes, and for both on any. */
enum { LISTS = 4 };

static size_t append(const struct few lists[LISTS], size_t *chosen, size_t count)
{
    size_t begin = count;
    for (int list = 0; list < LISTS; list++)
        for (int i = 0; i < lists[list].count; i++) {
            size_t at = begin;
            while (at < count && chosen[at] != lists[list].rows[i])
                at++;
            if (at == count)
                chosen[count++] = lists[list].rows[i];
        }
    return count;
}

size_t shortlist(const struct fleet *fleet, const struct question *question, const struct holders *holders,
                 const uint8_t *is_free, size_t *chosen)
{
    struct last last = {.size = NAN};
    bool is_left = true; /* whether a group may be left */
    int64_t group = INT64_MIN;
    size_t count = 0;
    while (is_left) {
        /* The groups in ascending order; mostly there is one, whose rows are then all visited once. */
        int64_t next = INT64_MAX, this_one = INT64_MAX;
        for (size_t row = 0; row < fleet->count; row++)
            if (is_free[row] && fleet->groups[row] >= group) {
                int64_t of_row = fleet->groups[row];
                if (of_row < this_one) {
                    next = this_one;
                    this_one = of_row;
                } else if (of_row > this_one && of_row < next)
                    next = of_row;
            }
        if (this_one == INT64_MAX)
            break;
        struct few lists[LISTS] = {{0}};
        for (size_t row = 0; row < fleet->count; row++) {
            if (!is_free[row] || fleet->groups[row] != this_one)
                continue;
            double cost_s[3];
            struct candidate candidate = estimate(fleet, question, holders, &last, row);
            shortlist_costs(&candidate, question, cost_s);
            if (flag(fleet, PREFILLS, row))
                few_add(&lists[0], row, cost_s[PREFILL]);
            if (flag(fleet, DECODES, row)) {
                few_add(&lists[1], row, cost_s[DECODE]);
                few_add(&lists[2], row, cost_s[WHOLE]);
            }
            few_add(&lists[3], row, cost_s[WHOLE]);
        }
        count = append(lists, chosen, count);
        group = next;
        is_left = next != INT64_MAX;
    }
    return count;
}

/* ---- the choice: evaluation.py and placer.py */

struct selection {
    const struct candidate *candidates;
    int count;
    const struct question *question;
};

/* Some of the candidates: those with all these bits, of one group or of any, and all but one. */
struct some {
    int64_t bits;
    const int64_t *group;
    int but;
};

static bool is_in(const struct selection *selection, const struct some *some, int i)
{
    const struct candidate *one = &selection->candidates[i];
    return (one->bits & some->bits) == some->bits && (!some->group || one->group == *some->group) && i != some->but;
}

/* The cheapest that meets the targets, or the cheapest if none does; among equals the one with the fewest legs, then
 * the one that was chosen longest ago.
 */
static int cheapest(const struct selection *selection, enum part part, struct some some)
{
    const struct candidate *all = selection->candidates;
    bool one_meets = false, is_first = true;
    for (int i = 0; i < selection->count && !one_meets; i++)
        one_meets = is_in(selection, &some, i) && meets(&all[i], selection->question, part);
#define EACH(i)                                                                                                      \
    for (int i = 0; i < selection->count; i++)                                                                        \
        if (is_in(selection, &some, i) && (!one_meets || meets(&all[i], selection->question, part)))
    double least_s = 0.0;
    EACH(i)
    {
        if (is_first || all[i].cost_s[part] < least_s)
            least_s = all[i].cost_s[part];
        is_first = false;
    }
    double limit_s = least_s + selection->question->tie_s;
    int best = -1;
    /* The second pass is for costs that are not numbers, which no limit contains. */
    for (int pass = 0; pass < 2 && best < 0; pass++)
        EACH(i)
        {
            if (!pass && !(all[i].cost_s[part] <= limit_s))
                continue;
            if (best < 0 || all[i].legs < all[best].legs ||
                (all[i].legs == all[best].legs && all[i].last_chosen < all[best].last_chosen))
                best = i;
        }
#undef EACH
    return best;
}

static double pair_s(const struct selection *selection, int prefill, int decode)
{
    return selection->candidates[prefill].cost_s[PREFILL] + selection->candidates[decode].cost_s[DECODE];
}

/* The smallest group of a prefill candidate that is larger than `*last`, or any when `last` is NULL. */
static const int64_t *next_group(const struct selection *selection, const int64_t *last)
{
    const int64_t *next = NULL;
    for (int i = 0; i < selection->count; i++) {
        const struct candidate *one = &selection->candidates[i];
        if (one->bits & PREFILLS_BIT && (!last || one->group > *last) && (!next || one->group < *next))
            next = &one->group;
    }
    return next;
}

/* The cheapest two different workers that may exchange KV. */
static bool cheapest_pair(const struct selection *selection, struct choice *best)
{
    double best_s = INFINITY;
    for (const int64_t *group = next_group(selection, NULL); group; group = next_group(selection, group)) {
        int prefill = cheapest(selection, PREFILL, (struct some){PREFILLS_BIT, group, -1});
        int decode = cheapest(selection, DECODE, (struct some){DECODES_BIT, group, -1});
        int pairs[2][2] = {{prefill, decode}, {-1, -1}};
        if (prefill == decode) {
            pairs[0][1] = cheapest(selection, DECODE, (struct some){DECODES_BIT, group, prefill});
            pairs[1][0] = cheapest(selection, PREFILL, (struct some){PREFILLS_BIT, group, decode});
            pairs[1][1] = decode;
        }
        for (int i = 0; i < 2; i++)
            if (pairs[i][0] >= 0 && pairs[i][1] >= 0 && pair_s(selection, pairs[i][0], pairs[i][1]) < best_s) {
                best_s = pair_s(selection, pairs[i][0], pairs[i][1]);
                best->prefill = pairs[i][0];
                best->decode = pairs[i][1];
            }
    }
    return best->prefill >= 0;
}

/* One worker for all of it: a prefill worker, too, where there is no other. */
static struct choice any_role(const struct selection *selection, enum why why, bool has_pair)
{
    int chosen = cheapest(selection, WHOLE, (struct some){DECODES_BIT, NULL, -1});
    if (chosen < 0)
        chosen = cheapest(selection, WHOLE, (struct some){0, NULL, -1});
    return (struct choice){-1, chosen, why, has_pair};
}

/* Two workers of role BOTH are taken only where a single one would miss the targets. */
static bool keep_on_one(const struct selection *selection, const struct choice *pair, int whole)
{
    int64_t both = PREFILLS_BIT | DECODES_BIT;
    return selection->question->mode == AUTO && whole >= 0 &&
           (selection->candidates[pair->prefill].bits & selection->candidates[pair->decode].bits & both) == both &&
           meets(&selection->candidates[whole], selection->question, WHOLE);
}

struct choice choose(const struct candidate *candidates, int count, const struct question *question)
{
    struct selection selection = {candidates, count, question};
    enum mode mode = question->mode;
    if (question->unsplittable || mode == AGGREGATED)
        return any_role(&selection, ASKED_FOR, false);
    struct choice pair = {-1, -1, APART, true};
    bool has_pair = cheapest_pair(&selection, &pair);
    int whole = mode == DISAGGREGATED ? -1 : cheapest(&selection, WHOLE, (struct some){DECODES_BIT | ALONE_BIT, NULL, -1});
    if (mode == DECODE_FIRST && whole >= 0)
        return (struct choice){-1, whole, ALONE_ASKED_FOR, has_pair};
    if (has_pair && !keep_on_one(&selection, &pair, whole) &&
        (whole < 0 || pair_s(&selection, pair.prefill, pair.decode) < candidates[whole].cost_s[WHOLE]))
        return pair;
    if (whole >= 0)
        return (struct choice){-1, whole, BEST_FOR_BOTH, has_pair};
    if (mode == DISAGGREGATED)
        return (struct choice){-1, -1, ROLE_MISSING, has_pair};
    return any_role(&selection, ROLE_MISSING, has_pair);
}
