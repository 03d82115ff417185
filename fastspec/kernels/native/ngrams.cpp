// Counting of a text in the arrays of an n-gram storage (fastspec/generation/drafters/ngram_storage.py, whose `feed` is the specification)
// and growing of trees from them (`grow` in nasd.py beside it): the contexts are nodes of a trie, found by hashes of (node, token), and
// after each there is a chain of what was counted.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
constexpr int BITS = 24;

struct Arrays {
    int64_t *keys;
    int32_t *slots;
    long mask;
    int32_t *heads, *tokens, *counts, *later;
    long edges, nodes, entries, width;

    // The number of an edge, 0 where there is none.
    long find(long node, long token) const {
        const int64_t key = int64_t(node) << BITS | token;
        long slot = (uint64_t(key) * GOLDEN >> 32) & mask;
        for (; slots[slot]; slot = (slot + 1) & mask)
            if (keys[slots[slot]] == key) return slots[slot];
        return 0;
    }

    // The number of an edge, which is made where there is none.
    long add(long node, long token) {
        const int64_t key = int64_t(node) << BITS | token;
        long slot = (uint64_t(key) * GOLDEN >> 32) & mask;
        for (; slots[slot]; slot = (slot + 1) & mask)
            if (keys[slots[slot]] == key) return slots[slot];
        keys[edges] = key;
        slots[slot] = int32_t(edges);
        return edges++;
    }

    // One more of a token after a context; a new one in a full tally replaces the least counted, oldest one.
    void count(long context, int32_t token) {
        const long first = heads[context];
        long before = -1, at = first, size = 0;
        for (; at >= 0 && tokens[at] != token; before = at, at = later[at]) ++size;
        if (at < 0 && size < width) {
            tokens[entries] = token, counts[entries] = 1, later[entries] = int32_t(first);
            heads[context] = int32_t(entries++);
            return;
        }
        if (at < 0) {
            before = -1, at = first;
            for (long ahead = first, next = later[first]; next >= 0; ahead = next, next = later[next])
                if (counts[next] <= counts[at]) before = ahead, at = next;
            tokens[at] = token, counts[at] = 0;
        }
        ++counts[at];
        if (before >= 0) later[before] = later[at], later[at] = int32_t(first), heads[context] = int32_t(at);
    }
};

// A token that may become a node. The likeliest comes first, of equals the one that was found first.
struct Draft {
    double chance;
    long found;
    int32_t parent, token;

    bool operator<(const Draft &other) const {
        return chance != other.chance ? chance < other.chance : found > other.found;
    }
};

}  // namespace

// `steps` tokens of a text, each behind the target's likeliest ones: `sizes` of them in `counted`. `context` has the `known` tokens before
// the first step, the last one in front, and room for `most`; `used` the lengths of keys, heads and tokens, whose arrays have room for more.
extern "C" void fastspec_count_ngrams(const int32_t *counted, const int32_t *sizes, long steps, int32_t *context, long known, long most,
                                      long least, int64_t *keys, int32_t *slots, long mask, int32_t *heads, int32_t *tokens, int32_t *counts,
                                      int32_t *later, long width, long *used) {
    Arrays arrays{keys, slots, mask, heads, tokens, counts, later, used[0], used[1], used[2], width};
    for (long step = 0; step < steps; counted += sizes[step++]) {
        long node = 0;
        for (long length = 1; known >= least && length <= known; ++length) {
            node = arrays.add(node, context[length - 1]);
            if (node == arrays.nodes) heads[arrays.nodes++] = -1;
            for (long each = 0; length >= least && each < sizes[step]; ++each) arrays.count(node, counted[each]);
        }
        known = known < most ? known + 1 : most;
        for (long place = known - 1; place > 0; --place) context[place] = context[place - 1];
        context[0] = counted[sizes[step] - 1];
    }
    used[0] = arrays.edges, used[1] = arrays.nodes, used[2] = arrays.entries;
}

// The likeliest tree of at most `nodes` nodes, `gamma` drafts deep, after the `known` tokens of `context`, `most` at the most, of which the
// last one, the root, comes first -> how many nodes it has. `doubts` are DOUBT, DOUBT_OF_ONE and SURELY_NOT.
extern "C" long fastspec_grow_ngrams(const int32_t *context, long known, long most, long shortest, int32_t root, int64_t *keys, int32_t *slots,
                                     long mask, int32_t *heads, int32_t *tokens, int32_t *counts, int32_t *later, long contexts, long gamma,
                                     long nodes, const int64_t *ends, long end_count, long guess, double least, const double *doubts,
                                     int32_t *out_tokens, int32_t *out_parents, double *out_chances) {
    const Arrays arrays{keys, slots, mask, heads, tokens, counts, later, 0, 0, 0, 0};
    std::vector<int32_t> places(size_t(nodes) * most);
    std::vector<long> lengths(nodes), depths(nodes);
    std::vector<Draft> queue;
    std::vector<std::pair<int32_t, int32_t>> next;  // token, count
    std::copy(context, context + known, places.begin());
    lengths[0] = known, out_tokens[0] = root, out_parents[0] = 0, out_chances[0] = 1.0;
    for (long found = 0, node = 0;; ++node) {
        const int32_t token = out_tokens[node];
        if (depths[node] < gamma && std::find(ends, ends + end_count, token) == ends + end_count) {
            long at = 0, length = 0;
            for (; length < lengths[node]; ++length) {
                const long deeper = arrays.find(at, places[node * most + length]);
                if (!deeper) break;
                at = deeper;
            }
            next.clear();
            double sum = 0.0;
            if (length < shortest) length = 0;
            if (length > 0 && at < contexts)
                for (long entry = heads[at]; entry >= 0; entry = later[entry]) {
                    next.emplace_back(tokens[entry], counts[entry]);
                    sum += counts[entry];
                }
            std::stable_sort(next.begin(), next.end(), [](auto &a, auto &b) { return a.second > b.second; });
            double doubt = length <= 1 ? doubts[1] : doubts[0] / std::pow(double(length), 0.5);
            if (next.empty() && guess) next.emplace_back(token, 1), sum = 1.0, doubt = doubts[2];
            const double share = out_chances[node] / (sum + doubt);
            for (auto &[follows, times] : next)
                if (share * times >= least) {
                    queue.push_back({share * times, found++, int32_t(node), follows});
                    std::push_heap(queue.begin(), queue.end());
                }
        }
        if (queue.empty() || node + 1 == nodes) return node + 1;
        std::pop_heap(queue.begin(), queue.end());
        const Draft best = queue.back();
        queue.pop_back();
        const long made = node + 1, parent = best.parent;
        out_tokens[made] = best.token, out_parents[made] = best.parent, out_chances[made] = best.chance;
        depths[made] = depths[parent] + 1, lengths[made] = std::min(most, lengths[parent] + 1);
        places[made * most] = best.token;
        std::copy_n(places.begin() + parent * most, lengths[made] - 1, places.begin() + made * most + 1);
    }
}
