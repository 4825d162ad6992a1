#include "placement.h"

#include <math.h>
#include <stdlib.h>

/* Rows are computed with the instructions that a machine has for several numbers at once. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_MACHINE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_MACHINE
#endif
#define INLINED __attribute__((always_inline)) static inline
#define N(what) fleet->numbers[(what) * fleet->stride + row]
#define FLAG(what) fleet->flags[(size_t)(what) * fleet->stride + row]

enum { TAIL_TOKENS = 16, SHORTLISTED = 4, RANKED_MAX = 8 };
#define BUSY_MAX 0.9
#define UNCROWDED 5.0
#define LEG_TRANSIT_SHARE 0.5
#define NEVER_S 1e9
#define EVICTED_MIN 64.0

INLINED double least(double one, double other)
{
    return other < one ? other : one;
}

INLINED double most(double one, double other)
{
    return other > one ? other : one;
}

INLINED double block_size_of(double size)
{
    return size >= 1.0 ? least(size, 0x1p53) : 1.0;
}

/* ---- rows */

/* Without branches, so that many rows are compared at once. */
FOR_EACH_MACHINE long find_rows(const struct fleet *table, const struct masks *given, double heard_min)
{
    const struct fleet copied = *table, *fleet = &copied;
    const struct masks masks = *given;
    uint8_t *restrict roles = fleet->roles, *restrict sources = fleet->sources;
    uint8_t is_named = masks.prefill_named | masks.answer_named;
    for (size_t row = 0; row < fleet->count; row++) {
        uint8_t awake = FLAG(READY) & masks.allowed[row] & (N(HEARD_AT) >= heard_min);
        uint8_t fit = awake & FLAG(SERVES) & masks.offering[row];
        uint8_t is_free = fit & (N(LEGS) < N(LEGS_MAX));
        uint8_t may_prefill = masks.may_prefill[row], answers = masks.may_answer[row];
        uint8_t wanted = (1 ^ is_named) | (masks.prefill_named & may_prefill) | (masks.answer_named & answers);
        uint8_t parts = (FLAG(PREFILLS) & may_prefill) * PREFILL_ROLE | (FLAG(DECODES) & answers) * DECODE_ROLE;
        uint8_t full = fit & !is_free & wanted;
        roles[row] = is_free * (FREE | parts | answers * ANSWER_ROLE) | fit * FIT | full * FULL;
        sources[row] = FLAG(EXCHANGES_KV) & (fit | (awake & !FLAG(SERVES)));
    }
    long free_count = 0;
    uint8_t all = 0;
    for (size_t row = 0; row < fleet->count; row++) {
        free_count += (roles[row] & FREE) != 0;
        all |= roles[row];
    }
    return all & FIT ? free_count : -1;
}

/* ---- holders */

static int by_rank(const void *left, const void *right)
{
    const struct holder *one = left, *other = right;
    if (one->group != other->group)
        return one->group < other->group ? -1 : 1;
    if (one->blocks != other->blocks)
        return one->blocks > other->blocks ? -1 : 1;
    return one->row < other->row ? -1 : one->row > other->row;
}

/* Mostly all holders are of one group. There, the few that matter are found faster than by sorting. */
static size_t rank(struct holder *holders, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (holders[i].group != holders[0].group) {
            qsort(holders, count, sizeof *holders, by_rank);
            return count;
        }
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        struct holder one = holders[i];
        if (kept == RANKED_MAX && by_rank(&one, &holders[kept - 1]) > 0)
            continue;
        size_t at = kept < RANKED_MAX ? kept++ : kept - 1;
        for (; at > 0 && by_rank(&one, &holders[at - 1]) < 0; at--)
            holders[at] = holders[at - 1];
        holders[at] = one;
    }
    return kept;
}

/* Without branches, which nobody could predict. */
void find_holders(struct fleet *fleet, const struct question *question)
{
    double tokens_min = (double)question->fetch_tokens_min;
    size_t count = 0;
    for (size_t row = 0; row < fleet->count; row++) {
        fleet->holders[count] = (struct holder){fleet->groups[row], fleet->blocks[row], (int64_t)row};
        count += fleet->sources[row] & ((double)fleet->blocks[row] * N(BLOCK_SIZE) >= tokens_min);
    }
    fleet->holder_count = question->options & UNSPLITTABLE ? 0 : rank(fleet->holders, count);
}

/* The first of a group, or the first of the next group. */
static size_t first_of(const struct fleet *fleet, int64_t group)
{
    size_t low = 0, high = fleet->holder_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (fleet->holders[middle].group < group)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Blocks that a holder of the group has, at most. */
static double most_blocks(const struct fleet *fleet, int64_t group)
{
    size_t i = first_of(fleet, group);
    return i < fleet->holder_count && fleet->holders[i].group == group ? (double)fleet->holders[i].blocks : 0.0;
}

int find_sources(const struct fleet *fleet, const struct question *question, const struct candidate *candidate,
                 size_t row, struct holder found[SOURCES_MAX])
{
    int64_t block_size = (int64_t)block_size_of(N(BLOCK_SIZE)), first = candidate->of.cached / block_size;
    int64_t last = (candidate->of.cached + candidate->of.fetched) / block_size;
    size_t begin = first_of(fleet, candidate->group);
    int count = 0;
    for (size_t i = begin; i < fleet->holder_count && i < begin + RANKED_MAX; i++) {
        struct holder one = fleet->holders[i];
        one.blocks = one.blocks < last ? one.blocks : last;
        if (one.group != candidate->group || count == SOURCES_MAX ||
            (one.blocks - first) * block_size < question->fetch_tokens_min)
            break;
        if (one.row != (int64_t)row)
            found[count++] = one;
    }
    return count;
}

/* ---- costs */

/* What all candidates share. */
struct shared {
    double eviction_price; /* in tokens computed again, for each token that is stored */
    double itl_free_s;     /* a decode step that costs nothing */
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
    double left_s = most(reported_s - (question->now - N(HEARD_AT)), 0.0) + N(SENT_TOKENS) * token_s;
    return most(left_s, 0.5 * step_s);
}

static struct shared share(const struct fleet *fleet, const struct question *question)
{
    double least_s = INFINITY, evicted = 0.0, restored = 0.0, busy = 0.0, count = 0.0;
    for (size_t row = 0; row < fleet->count; row++) {
        if (!(fleet->roles[row] & FREE))
            continue;
        if (FLAG(DECODES))
            least_s = least(least_s, N(DECODE_STEP_S) + more_s(fleet, question, row));
        if (FLAG(PREFILLS)) {
            evicted += N(EVICTED_BLOCKS);
            restored += N(RESTORED_BLOCKS);
            busy += least(N(PROMPTS_PER_S) * mean_token_s(fleet, row), BUSY_MAX);
            count += 1.0;
        }
    }
    bool has_target = question->itl_target_s < INFINITY;
    return (struct shared){
        .eviction_price = restored > 0.0 ? least(1.0, restored / most(evicted, EVICTED_MIN)) / (1.0 - busy / count) : 0.0,
        .itl_free_s = has_target ? question->itl_target_s : UNCROWDED * least_s,
    };
}

/* From 0 to NEVER_S, which also stands for what is not a number: so all costs can be compared. */
INLINED double bounded(double cost_s)
{
    return cost_s < NEVER_S ? most(cost_s, 0.0) : NEVER_S;
}

/* As one leg of a pair. */
INLINED double leg_transit_s(const struct fleet *fleet, const struct question *question, size_t row)
{
    return N(TRANSIT_S) * (question->options & STREAMS ? LEG_TRANSIT_SHARE : 1.0);
}

/* Without branches, so that many rows are compared at once. */
FOR_EACH_MACHINE bool lacks_room(const struct fleet *table, const struct question *question)
{
    const struct fleet copied = *table, *fleet = &copied;
    double room = (double)question->tokens + (double)question->tokens_out;
    uint8_t any = 0;
    for (size_t row = 0; row < fleet->count; row++)
        any |= ((fleet->roles[row] & FREE) != 0) & (fleet->blocks[row] > 0) & (N(FREE_TOKENS) < room);
    return any;
}

/* `blocks` of the prompt are on the row, `elsewhere` on a worker of whom it can fetch: itself, perhaps. */
INLINED struct estimate estimate(const struct fleet *fleet, const struct question *question,
                                 const struct shared *shared, size_t row, double blocks, double elsewhere)
{
    struct estimate to;
    double tokens = (double)question->tokens, out = (double)question->tokens_out;

    /* The batch: seconds of a step of those that decode, and with this request in it. */
    double token_s = mean_token_s(fleet, row), decoding = N(DECODING), slower_s = more_s(fleet, question, row);
    double step_s = N(DECODE_STEP_S) + N(DECODE_REQUEST_S) * decoding + N(DECODE_CONTEXT_TOKEN_S) * N(CONTEXT_TOKENS);
    double full_step_s = step_s + slower_s, shared_step_s = decoding > 0.0 ? step_s : 0.0;
    double excess_s = most(full_step_s - shared->itl_free_s, 0.0);
    double disturbed = full_step_s > shared->itl_free_s ? decoding * N(ANSWERS) : 0.0;
    double between_s = shared_step_s / N(STEP_TOKENS);
    to.itl_s = full_step_s / (1.0 - least(N(PROMPTS_PER_S) * token_s, BUSY_MAX));
    to.step_s = full_step_s;

    /* The prompt: computed, or a part of it fetched where that ends sooner. The last token is always computed. */
    double block_size = block_size_of(N(BLOCK_SIZE)), usable = floor(most(tokens - 1.0, 0.0) / block_size);
    double found = least(blocks, usable) * block_size, reach = least(elsewhere, usable) * block_size;
    double held = most(found - N(DROPPED_TOKENS), 0.0), missing = reach - held;
    double alone_s = work_s(fleet, row, tokens - held, held);
    double reading_s = N(TRANSFER_BASE_S) + N(TRANSFER_TOKEN_S) * missing;
    double rest_s = work_s(fleet, row, tokens - reach, reach);
    bool is_elsewhere = (reach > found) & (missing >= (double)question->fetch_tokens_min);
    bool fetches = is_elsewhere & (reading_s + rest_s < alone_s);
    double own_s = fetches ? rest_s : alone_s, fetched = fetches ? missing : 0.0, computed = tokens - held - fetched;
    to.cached = (int64_t)held;
    to.fetched = (int64_t)fetched;
    to.computed = (int64_t)computed;
    to.queue_s = waiting_s(fleet, question, row, token_s + between_s, shared_step_s);
    to.fetch_s = fetches ? reading_s : 0.0;
    to.prefill_s = own_s + computed * between_s;
    to.prefill_others_s = own_s * disturbed + shared->eviction_price * N(PREFILL_TOKEN_S) * (tokens - held);

    /* The answer. */
    double lacking = tokens - held, exposed = question->options & STREAMS ? least(lacking, N(STEP_TOKENS)) : lacking;
    to.handoff_s = N(TRANSFER_BASE_S) + N(TRANSFER_TOKEN_S) * exposed;
    to.decode_s = out * to.itl_s;
    double in_use = least((double)fleet->in_use[row] * block_size, held);
    to.kv_wait_s = N(FREE_TOKENS) < tokens - in_use + out ? to.decode_s : 0.0;
    to.within_s = to.decode_s - out * excess_s;
    to.first_s = N(PREFILL_STEP_S) + N(PREFILL_TOKEN_S) * TAIL_TOKENS + shared_step_s;
    to.decode_others_s = out * slower_s * disturbed;

    double transit_s = leg_transit_s(fleet, question, row);
    double prompt_s = to.queue_s + to.fetch_s + to.prefill_s + to.prefill_others_s;
    double answer_s = to.kv_wait_s + to.decode_s - to.within_s + to.decode_others_s;
    to.cost_s[PREFILL] = bounded(prompt_s + transit_s);
    to.cost_s[DECODE] = bounded(to.handoff_s + to.queue_s + to.first_s + transit_s + answer_s);
    to.cost_s[WHOLE] = bounded(prompt_s + N(TRANSIT_S) + answer_s);
    return to;
}

static bool is_late(const struct estimate *of, const struct question *question)
{
    return of->queue_s + of->fetch_s + of->prefill_s > question->ttft_target_s;
}

static bool is_slow(const struct estimate *of, const struct question *question)
{
    return of->step_s > question->itl_target_s;
}

/* ---- the shortlist of a large fleet */

/* The costs of all rows, of which those that miss a target come after all that meet them. */
FOR_EACH_MACHINE static void estimate_all(const struct fleet *table, const struct question *asked,
                                          const struct shared *of_all, const double *restrict elsewhere,
                                          double *restrict prefill_s, double *restrict decode_s,
                                          double *restrict whole_s)
{
    const struct fleet copied = *table, *fleet = &copied;
    const struct question question = *asked;
    const struct shared shared = *of_all;
    for (size_t row = 0; row < fleet->count; row++) {
        struct estimate of = estimate(fleet, &question, &shared, row, (double)fleet->blocks[row], elsewhere[row]);
        double late_s = is_late(&of, &question) ? NEVER_S : 0.0, slow_s = is_slow(&of, &question) ? NEVER_S : 0.0;
        prefill_s[row] = of.cost_s[PREFILL] + late_s;
        decode_s[row] = of.cost_s[DECODE] + slow_s;
        whole_s[row] = of.cost_s[WHOLE] + late_s + slow_s;
    }
}

/* Appends the cheapest rows of a group that have the role to `chosen`, unless they are there since `begin`. Returns the
 * new number of chosen rows. They are in order; of equals the first rows.
 */
static size_t append_cheapest(const struct fleet *fleet, int64_t group, enum role role, const double *costs_s,
                              size_t begin, size_t count)
{
    size_t rows[SHORTLISTED], found = 0;
    for (size_t row = 0; row < fleet->count; row++) {
        if (found == SHORTLISTED && !(costs_s[row] < costs_s[rows[SHORTLISTED - 1]]))
            continue;
        if (!(fleet->roles[row] & role) || fleet->groups[row] != group)
            continue;
        size_t at = found < SHORTLISTED ? found++ : SHORTLISTED - 1;
        for (; at > 0 && costs_s[row] < costs_s[rows[at - 1]]; at--)
            rows[at] = rows[at - 1];
        rows[at] = row;
    }
    for (size_t i = 0; i < found; i++) {
        size_t at = begin;
        while (at < count && fleet->chosen[at] != rows[i])
            at++;
        if (at == count)
            fleet->chosen[count++] = rows[i];
    }
    return count;
}

/* The smallest group of a free row that is at least `least`; INT64_MAX: there is none. */
static int64_t group_from(const struct fleet *fleet, int64_t least)
{
    int64_t found = INT64_MAX;
    for (size_t row = 0; row < fleet->count; row++) {
        int64_t group = fleet->roles[row] & FREE ? fleet->groups[row] : INT64_MAX;
        found = group >= least && group < found ? group : found;
    }
    return found;
}

/* The cheapest workers of each group for each part. */
static size_t shortlist(const struct fleet *fleet, const struct question *question, const struct shared *shared)
{
    double *elsewhere = fleet->costs_s, *prefill_s = elsewhere + fleet->count, *decode_s = prefill_s + fleet->count;
    double *whole_s = decode_s + fleet->count;
    double most = 0.0;
    for (size_t row = 0; row < fleet->count; row++) {
        if (!row || fleet->groups[row] != fleet->groups[row - 1])
            most = most_blocks(fleet, fleet->groups[row]);
        elsewhere[row] = FLAG(EXCHANGES_KV) ? most : 0.0;
    }
    estimate_all(fleet, question, shared, elsewhere, prefill_s, decode_s, whole_s);
    size_t count = 0;
    for (int64_t group = INT64_MIN; (group = group_from(fleet, group)) < INT64_MAX; group++) {
        size_t begin = count;
        count = append_cheapest(fleet, group, PREFILL_ROLE, prefill_s, begin, count);
        count = append_cheapest(fleet, group, DECODE_ROLE, decode_s, begin, count);
        count = append_cheapest(fleet, group, DECODE_ROLE, whole_s, begin, count);
        count = append_cheapest(fleet, group, ANSWER_ROLE, whole_s, begin, count);
    }
    return count;
}

/* ---- candidates */

/* Whether some KV could be handed over to the worker. */
static bool is_receiver(const struct candidate *candidate, const struct fleet *fleet, const struct question *question,
                        size_t row)
{
    int64_t held = question->options & MAY_DECODE_FIRST ? candidate->of.cached : 0;
    return (double)(question->tokens - held) >= N(HANDED_OVER_MIN) || !FLAG(EXCHANGES_KV);
}

/* Whether a worker to which KV could be handed over may serve the request without a prefill worker. */
static bool may_serve_alone(const struct candidate *candidate, const struct fleet *fleet,
                            const struct question *question, size_t row)
{
    int options = question->options;
    if (options & PREFILL_NAMED)
        return false;
    if (FLAG(ATTACHED))
        return question->mode != DECODE_FIRST;
    if (question->mode != DECODE_FIRST) {
        if (candidate->roles & BOTH_ROLE)
            return true;
        if (options & HIT_THRESHOLD)
            return false;
    }
    double hit = (double)(candidate->of.cached + candidate->of.fetched);
    bool has_most = hit >= question->decode_first_share_min * (double)question->tokens;
    return options & MAY_DECODE_FIRST && has_most && FLAG(EXCHANGES_KV) && (double)candidate->of.computed <= N(STEP_TOKENS);
}

int find_candidates(struct fleet *fleet, const struct question *question, struct candidate *candidates)
{
    struct shared shared = share(fleet, question);
    size_t count = 0;
    if (question->options & SHORT)
        count = shortlist(fleet, question, &shared);
    else
        for (size_t row = 0; row < fleet->count; row++)
            if (fleet->roles[row] & (PREFILL_ROLE | ANSWER_ROLE))
                fleet->chosen[count++] = row;
    for (size_t i = 0; i < count; i++) {
        size_t row = fleet->chosen[i];
        double elsewhere = FLAG(EXCHANGES_KV) ? most_blocks(fleet, fleet->groups[row]) : 0.0;
        struct candidate *one = &candidates[i];
        *one = (struct candidate){
            .roles = (fleet->roles[row] & (PREFILL_ROLE | DECODE_ROLE | ANSWER_ROLE)) |
                     (FLAG(PREFILLS) && FLAG(DECODES) ? BOTH_ROLE : 0),
            .group = fleet->groups[row],
            .of = estimate(fleet, question, &shared, row, (double)fleet->blocks[row], elsewhere),
            .legs = N(LEGS),
            .last_chosen = N(LAST_CHOSEN),
            .transit_s = N(TRANSIT_S),
            .leg_transit_s = leg_transit_s(fleet, question, row),
        };
        if (!(one->roles & DECODE_ROLE))
            continue;
        bool receives = is_receiver(one, fleet, question, row);
        one->roles |= receives ? RECEIVER_ROLE : 0;
        one->roles |= !receives || may_serve_alone(one, fleet, question, row) ? ALONE_ROLE : 0;
    }
    return (int)count;
}

/* ---- the choice */

struct selection {
    const struct candidate *candidates;
    int count;
    const struct question *question;
};

/* Some of the candidates: those with all these roles and none of others, of one group or of any, and all but one. */
struct some {
    int64_t roles, others;
    const int64_t *group;
    int but;
};

static bool is_in(const struct selection *selection, const struct some *some, int i)
{
    const struct candidate *one = &selection->candidates[i];
    return (one->roles & (some->roles | some->others)) == some->roles && (!some->group || one->group == *some->group) && i != some->but;
}

static bool meets(const struct candidate *candidate, const struct question *question, enum part part)
{
    return !(part != DECODE && is_late(&candidate->of, question)) &&
           !(part != PREFILL && is_slow(&candidate->of, question));
}

/* The cheapest that meets the targets, or the cheapest if none does; among equals the one with the fewest legs, then
 * the one that was chosen longest ago.
 */
static int cheapest(const struct selection *selection, enum part part, struct some some)
{
    const struct candidate *all = selection->candidates;
    bool one_meets = false;
    for (int i = 0; i < selection->count && !one_meets; i++)
        one_meets = is_in(selection, &some, i) && meets(&all[i], selection->question, part);
#define EACH(i)                                                                                                      \
    for (int i = 0; i < selection->count; i++)                                                                        \
        if (is_in(selection, &some, i) && (!one_meets || meets(&all[i], selection->question, part)))
    double least_s = INFINITY;
    EACH(i)
        least_s = least(least_s, all[i].of.cost_s[part]);
    double limit_s = least_s + selection->question->tie_s;
    int best = -1;
    EACH(i)
        if (all[i].of.cost_s[part] <= limit_s &&
            (best < 0 || all[i].legs < all[best].legs ||
             (all[i].legs == all[best].legs && all[i].last_chosen < all[best].last_chosen)))
            best = i;
#undef EACH
    return best;
}

static double pair_s(const struct selection *selection, int prefill, int decode)
{
    return selection->candidates[prefill].of.cost_s[PREFILL] + selection->candidates[decode].of.cost_s[DECODE];
}

/* The smallest group of a prefill candidate that is larger than `*last`, or any when `last` is NULL. */
static const int64_t *next_group(const struct selection *selection, const int64_t *last)
{
    const int64_t *next = NULL;
    for (int i = 0; i < selection->count; i++) {
        const struct candidate *one = &selection->candidates[i];
        if (one->roles & PREFILL_ROLE && (!last || one->group > *last) && (!next || one->group < *next))
            next = &one->group;
    }
    return next;
}

/* The cheapest two different workers that may exchange KV, and have some to exchange. */
static bool cheapest_pair(const struct selection *selection, struct choice *best)
{
    double best_s = INFINITY;
    for (const int64_t *group = next_group(selection, NULL); group; group = next_group(selection, group)) {
        int prefill = cheapest(selection, PREFILL, (struct some){PREFILL_ROLE, 0, group, -1});
        int decode = cheapest(selection, DECODE, (struct some){RECEIVER_ROLE, 0, group, -1});
        int pairs[2][2] = {{prefill, decode}, {-1, -1}};
        if (prefill == decode) {
            pairs[0][1] = cheapest(selection, DECODE, (struct some){RECEIVER_ROLE, 0, group, prefill});
            pairs[1][0] = cheapest(selection, PREFILL, (struct some){PREFILL_ROLE, 0, group, decode});
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
    int chosen = cheapest(selection, WHOLE, (struct some){DECODE_ROLE, 0, NULL, -1});
    if (chosen < 0)
        chosen = cheapest(selection, WHOLE, (struct some){ANSWER_ROLE, 0, NULL, -1});
    return (struct choice){-1, chosen, why, has_pair};
}

/* Whether another worker could compute the prompt for this one, but would hand over nothing. */
static bool lacks_no_block(const struct selection *selection, int whole)
{
    const struct candidate *all = selection->candidates;
    struct some partners = {PREFILL_ROLE, 0, &all[whole].group, whole};
    if (all[whole].roles & RECEIVER_ROLE)
        return false;
    for (int i = 0; i < selection->count; i++)
        if (is_in(selection, &partners, i))
            return true;
    return false;
}

/* Two workers of role BOTH are taken only where a single one would miss the targets. */
static bool keep_on_one(const struct selection *selection, const struct choice *pair, int whole)
{
    const struct candidate *all = selection->candidates;
    return selection->question->mode == AUTO && whole >= 0 &&
           all[pair->prefill].roles & all[pair->decode].roles & BOTH_ROLE &&
           meets(&all[whole], selection->question, WHOLE);
}

struct choice choose(const struct candidate *candidates, int count, const struct question *question)
{
    struct selection selection = {candidates, count, question};
    int mode = question->mode;
    if (question->options & UNSPLITTABLE || mode == AGGREGATED)
        return any_role(&selection, ASKED_FOR, false);
    struct choice pair = {-1, -1, APART, true};
    bool has_pair = cheapest_pair(&selection, &pair);
    int64_t others = mode == DISAGGREGATED ? RECEIVER_ROLE : 0;
    int whole = cheapest(&selection, WHOLE, (struct some){ALONE_ROLE, others, NULL, -1});
    if (mode == DECODE_FIRST && whole >= 0)
        return (struct choice){-1, whole, ALONE_ASKED_FOR, has_pair};
    if (has_pair && !keep_on_one(&selection, &pair, whole) &&
        (whole < 0 || question->options & PREFILL_NAMED ||
         pair_s(&selection, pair.prefill, pair.decode) < candidates[whole].of.cost_s[WHOLE]))
        return pair;
    if (whole >= 0)
        return (struct choice){-1, whole, lacks_no_block(&selection, whole) ? NOTHING_TO_HAND_OVER : BEST_FOR_BOTH,
                               has_pair};
    if (mode == DISAGGREGATED || question->options & PREFILL_NAMED)
        return (struct choice){-1, -1, ROLE_MISSING, has_pair};
    return any_role(&selection, ROLE_MISSING, has_pair);
}
