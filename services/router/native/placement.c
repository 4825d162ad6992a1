#include <math.h>
#include <stdlib.h>

#include "cost.h"

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

int64_t most_blocks(const struct holders *holders, int64_t group)
{
    size_t i = first_of(holders, group);
    return i < holders->count && holders->ranked[i].group == group ? holders->ranked[i].blocks : 0;
}

int find_sources(const struct fleet *fleet, const struct question *question, const struct holders *holders,
                 const struct candidate *candidate, size_t row, struct holder found[SOURCES_MAX])
{
    int64_t block_size = block_size_of(N(BLOCK_SIZE)), first = candidate->cached / block_size;
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

/* ---- numbers of all candidates: cost.py */

static size_t end_from(const struct fleet *fleet, size_t first)
{
    return first + TOGETHER < fleet->count ? first + TOGETHER : fleet->count;
}

FOR_EACH_MACHINE double uncrowded_itl_s(const struct fleet *fleet, const struct question *question,
                                        const uint8_t *is_free)
{
    const uint8_t *decodes = fleet->flags + DECODES * fleet->stride;
    double alone_s[TOGETHER], least_s = INFINITY;
    for (size_t first = 0, end; first < fleet->count; first = end) {
        end = end_from(fleet, first);
        for (size_t row = first; row < end; row++) {
            double of_row_s = N(DECODE_STEP_S) + more_s(fleet, question, row);
            alone_s[row - first] = is_free[row] & decodes[row] ? of_row_s : INFINITY;
        }
        for (size_t i = end - first; i < TOGETHER; i++)
            alone_s[i] = INFINITY;
        double of_rows_s = least_of(alone_s, TOGETHER);
        least_s = of_rows_s < least_s ? of_rows_s : least_s;
    }
    return UNCROWDED * (least_s + 0.0);
}

FOR_EACH_MACHINE double eviction_price(const struct fleet *fleet, const uint8_t *is_free)
{
    const uint8_t *prefills = fleet->flags + PREFILLS * fleet->stride;
    double stored = 0.0, used = 0.0, busy = 0.0;
    size_t count = 0;
    for (size_t first = 0, end; first < fleet->count; first = end) {
        double stored_by[TOGETHER], used_of[TOGETHER], busy_for[TOGETHER];
        end = end_from(fleet, first);
        for (size_t row = first; row < end; row++) {
            bool is_in = is_free[row] & prefills[row];
            double share = least(N(PROMPTS_PER_S) * mean_token_s(fleet, row), BUSY_MAX, true);
            stored_by[row - first] = is_in ? N(STORED_TOKENS) : 0.0;
            used_of[row - first] = is_in ? N(USED_TOKENS) : 0.0;
            busy_for[row - first] = is_in ? share : 0.0;
            count += is_in;
        }
        /* One after the other, as Python does: the order changes the last bits. Zeros change nothing. */
        for (size_t i = 0; i < end - first; i++) {
            stored += stored_by[i];
            used += used_of[i];
            busy += busy_for[i];
        }
    }
    if (!(used > 0.0 && stored > 0.0))
        return 0.0;
    double reused = used / stored;
    return (reused < 1.0 ? reused : 1.0) / (1.0 - busy / (double)count);
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

struct candidate evaluate(const struct fleet *fleet, const struct question *question, const struct holders *holders,
                          size_t row)
{
    struct estimate of = estimate(fleet, question, row, prefix_of(fleet, question, holders, row));
    struct candidate candidate = {
        .group = fleet->groups[row],
        .bits = (flag(fleet, PREFILLS, row) ? PREFILLS_BIT : 0) | (flag(fleet, DECODES, row) ? DECODES_BIT : 0),
        .cached = (int64_t)of.cached,
        .fetched = (int64_t)of.fetched,
        .computed = (int64_t)of.computed,
        .queue_s = of.queue_s,
        .fetch_s = of.fetch_s,
        .prefill_s = of.prefill_s,
        .others_s = of.others_s,
        .handoff_s = of.handoff_s,
        .decode_queue_s = of.decode_queue_s,
        .kv_wait_s = of.kv_wait_s,
        .decode_s = of.decode_s,
        .within_s = of.within_s,
        .itl_s = of.itl_s,
        .step_s = of.step_s,
        .first_s = of.first_s,
        .decode_others_s = of.decode_others_s,
        .cost_s = {of.cost_s[PREFILL], of.cost_s[DECODE], of.cost_s[WHOLE]},
        .legs = N(LEGS),
        .last_chosen = N(LAST_CHOSEN),
        .transit_s = N(TRANSIT_S),
    };
    if (candidate.bits & DECODES_BIT && may_serve_alone(&candidate, fleet, question, row))
        candidate.bits |= ALONE_BIT;
    return candidate;
}

static bool is_late(const struct candidate *candidate, const struct question *question)
{
    return ttft_s(candidate->queue_s, candidate->fetch_s, candidate->prefill_s) > question->ttft_target_s;
}

static bool is_slow(const struct candidate *candidate, const struct question *question)
{
    return candidate->step_s > question->itl_target_s;
}

static bool meets(const struct candidate *candidate, const struct question *question, enum part part)
{
    return !(part != DECODE && is_late(candidate, question)) && !(part != PREFILL && is_slow(candidate, question));
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
