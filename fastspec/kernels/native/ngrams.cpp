// Counting of a text in the arrays of an n-gram storage (fastspec/generation/drafters/ngram_storage.py, whose `feed` is the specification):
// the contexts are nodes of a trie, found by hashes of (node, token), and after each there is a chain of what was counted.

#include <cstdint>

namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
constexpr int BITS = 24;

struct Arrays {
    int64_t *keys;
    int32_t *slots;
    long mask;
    int32_t *heads, *tokens, *counts, *later;
    long edges, nodes, entries, width;

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
