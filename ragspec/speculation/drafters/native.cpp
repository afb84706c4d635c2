// Drafts for all rows of a step in one call: ngram_index.py, calibration.py, context.py and prompt_lookup.py in C++.
//
// The arithmetic has the order of theirs, so that drafts are equal. native.py puts their constants before this text and
// says what the functions at its end do. Limit: token ids are below 2^31.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <unordered_set>
#include <vector>

namespace {

using Token = int32_t;

constexpr int SEARCHES = 16;  // at once

enum Origin { PROMPT, OUTPUT, OTHER_CONTEXT, OTHER_OUTPUT, ORIGINS };

uint64_t mixed(uint64_t x) {
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ULL;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ULL;
    return x ^ (x >> 32);
}

// -- n-grams --------------------------------------------------------------------------------------

// The hash of an n-gram, from its last token to its first.
class Key {
public:
    uint32_t with(Token token) {
        key_ = (key_ + uint32_t(token) + 1) * 0x9e3779b97f4a7c15ULL;
        return uint32_t((key_ ^ key_ >> 29) * 0xd6e8feb86659fd93ULL >> 32);
    }

    static uint32_t of(const Token* end, int n) {
        Key key;
        for (int i = 1; i < n; i++) key.with(end[-i]);
        return key.with(end[-n]);
    }

private:
    uint64_t key_ = 0;
};

bool same(const Token* one, const Token* other, int n) {
    for (int i = 1; i <= n; i++)
        if (one[-i] != other[-i]) return false;
    return true;
}

// The latest position of each n-gram. The text is not in it: positions are those of the caller's. 0: none.
class Latest {
public:
    void reserve(size_t tokens) {
        size_t slots = 64;
        while (3 * slots < 4 * tokens) slots *= 2;
        if (slots > slots_.size()) resize(slots);
    }

    int32_t get(const Token* text, const Token* end, int n, uint32_t hash) const {
        return slots_.empty() ? 0 : slots_[find(text, end, n, hash)].position;
    }

    // Asks for the memory of an n-gram's slot, so that get() need not wait for it.
    void fetch(uint32_t hash) const {
        if (!slots_.empty()) __builtin_prefetch(&slots_[hash & (slots_.size() - 1)]);
    }

    // Returns the position that an n-gram has if no other hash is in its slot; it may be another's.
    int32_t likely(uint32_t hash) const { return slots_.empty() ? 0 : slots_[hash & (slots_.size() - 1)].position; }

    // Sets the position of the n-gram before it; returns the one that it had.
    int32_t set(const Token* text, int32_t position, int n, uint32_t hash) {
        if (4 * (used_ + 1) > 3 * slots_.size()) resize(slots_.empty() ? 64 : 2 * slots_.size());
        Slot& slot = slots_[find(text, text + position, n, hash)];
        int32_t before = slot.position;
        used_ += before == 0;
        slot = {hash, position};
        return before;
    }

private:
    struct Slot {
        uint32_t hash;
        int32_t position;
    };
    std::vector<Slot> slots_;
    size_t used_ = 0;

    size_t find(const Token* text, const Token* end, int n, uint32_t hash) const {
        size_t mask = slots_.size() - 1;
        for (size_t at = hash & mask;; at = (at + 1) & mask) {
            const Slot& slot = slots_[at];
            if (slot.position == 0 || (slot.hash == hash && same(text + slot.position, end, n))) return at;
        }
    }

    void resize(size_t size) {
        std::vector<Slot> old(size, Slot{0, 0});
        old.swap(slots_);
        size_t mask = size - 1;
        for (const Slot& slot : old) {
            if (slot.position == 0) continue;
            size_t at = slot.hash & mask;
            while (slots_[at].position) at = (at + 1) & mask;
            slots_[at] = slot;
        }
    }
};

// A growing text and its n-grams of `smallest` to `largest` tokens. A position is the one just after an n-gram.
//
// Added tokens are looked through one by one until catch_up() indexes them, or there are many.
class Index {
public:
    std::vector<Token> tokens;

    Index(int smallest, int largest) : latest_(largest + 1), smallest_(smallest), largest_(largest) {
        before_.resize(sizes());
    }

    void reserve(size_t count) {
        tokens.reserve(count);
        before_.reserve((count + 1) * sizes());
        for (int n = smallest_; n <= largest_; n++) latest_[n].reserve(count);
    }

    void extend(const Token* added, size_t count) {
        tokens.insert(tokens.end(), added, added + count);
        if (tokens.size() - indexed_ > size_t(MOST_UNINDEXED)) catch_up();
    }

    void catch_up() {
        before_.resize((tokens.size() + 1) * sizes());
        while (indexed_ < tokens.size()) {
            size_t position = ++indexed_;
            const Token* end = tokens.data() + position;
            int32_t* before = &before_[position * sizes()] - smallest_;
            Key key;
            for (int n = 1; n <= largest_ && size_t(n) <= position; n++) {
                uint32_t hash = key.with(end[-n]);
                if (n >= smallest_) before[n] = latest_[n].set(tokens.data(), int32_t(position), n, hash);
            }
        }
    }

private:
    friend class Search;
    std::vector<Latest> latest_;   // by n
    std::vector<int32_t> before_;  // by position and n: the position of the same n-gram before it
    size_t indexed_ = 0;           // tokens
    int smallest_, largest_;

    size_t sizes() const { return size_t(largest_ - smallest_ + 1); }
    const int32_t& before(int32_t position, int n) const {
        return before_[size_t(position) * sizes() + size_t(n - smallest_)];
    }
};

// Looks for up to KEPT positions before which a text ends like [end - size, end), longer n-grams and later positions
// first. Each step asks for the memory that the next one reads; others' steps hide the time that it takes to come.
class Search {
public:
    int count = 0;
    int32_t found[KEPT];  // in order

    void begin(const Index& index, const Token* end, size_t size) {
        index_ = &index;
        end_ = end;
        n_ = longest_ = size < size_t(index.largest_) ? int(size) : index.largest_;
        position_ = count = 0;
        looked_up_ = false;
        for (int n = longest_; n >= index.smallest_; n--) index.latest_[n].fetch(Key::of(end, n));
    }

    // Returns whether there are more.
    bool step() {
        const Index& index = *index_;
        const Token* text = index.tokens.data();
        if (!looked_up_) {
            looked_up_ = true;
            for (int n = longest_; n >= index.smallest_; n--) {
                int32_t position = index.latest_[n].likely(Key::of(end_, n));
                __builtin_prefetch(text + position);
                __builtin_prefetch(&index.before(position, n));
            }
            return true;
        }
        while (n_ >= index.smallest_ && !position_) {
            size_t first = index.indexed_ < size_t(n_) ? size_t(n_) : index.indexed_ + 1;
            for (size_t position = index.tokens.size(); position >= first; position--) {
                if (!same(text + position, end_, n_)) continue;
                add(int32_t(position));
                if (count == KEPT) return false;
            }
            position_ = index.latest_[n_].get(text, end_, n_, Key::of(end_, n_));
            n_--;
        }
        if (!position_) return false;
        add(position_);
        __builtin_prefetch(text + position_);
        position_ = index.before(position_, n_ + 1);
        __builtin_prefetch(&index.before(position_, n_ + 1));
        return count < KEPT;
    }

private:
    const Index* index_;
    const Token* end_;
    int n_, longest_;
    int32_t position_;
    bool looked_up_;

    void add(int32_t position) {
        int at = count;
        while (at > 0 && found[at - 1] > position) at--;
        if (at > 0 && found[at - 1] == position) return;
        std::memmove(found + at + 1, found + at, size_t(count - at) * sizeof *found);
        found[at] = position;
        count++;
    }
};

// Steps through several searches in turn.
void finish(Search* const* searches, int count) {
    Search* left[SEARCHES];
    std::copy(searches, searches + count, left);
    while (count) {
        int going = 0;
        for (int i = 0; i < count; i++)
            if (left[i]->step()) left[going++] = left[i];
        count = going;
    }
}

// Returns how many tokens before `position`, from `floor` on, agree with those before `end`, of which there are `size`.
int agreement(const Token* text, int32_t position, int32_t floor, const Token* end, size_t size) {
    int longest = LONGEST_MATCH;
    if (position - floor < longest) longest = position - floor;
    if (size < size_t(longest)) longest = int(size);
    int length = 0;
    while (length < longest && text[position - 1 - length] == end[-1 - length]) length++;
    return length;
}

// -- calibration ----------------------------------------------------------------------------------

struct Weight {
    double value = 0.0, squared = 1.0;

    void learn(double error) {
        double sum = squared + error * error;
        squared = SLOWEST <= sum ? SLOWEST : sum;
        value += PACE * error / std::sqrt(squared);
    }
};

// The weights of a token as a guess and as the token before one.
struct TokenWeights {
    Token token = 0;
    bool known = false;
    Weight guess, before;
};

// The weights of all tokens: initial ones for those that were not learnt.
class Vocabulary {
public:
    const TokenWeights& get(Token token) const { return slots_[find(token)]; }

    // Asks for the memory of a token's weights.
    void fetch(Token token) const { __builtin_prefetch(&slots_[first(token)]); }

    TokenWeights& learnt(Token token) {
        if (2 * (used_ + 1) > slots_.size()) grow();
        TokenWeights& slot = slots_[find(token)];
        used_ += !slot.known;
        slot.known = true;
        slot.token = token;
        return slot;
    }

private:
    std::vector<TokenWeights> slots_ = std::vector<TokenWeights>(1024);
    size_t used_ = 0;

    size_t find(Token token) const {
        size_t mask = slots_.size() - 1, at = first(token);
        while (slots_[at].known && slots_[at].token != token) at = (at + 1) & mask;
        return at;
    }

    size_t first(Token token) const { return uint32_t(token) * 0x9e3779b1u >> 8 & (slots_.size() - 1); }

    void grow() {
        std::vector<TokenWeights> old(2 * slots_.size());
        old.swap(slots_);
        for (const TokenWeights& slot : old)
            if (slot.known) slots_[find(slot.token)] = slot;
    }
};

struct Features {
    int match, vote, start;
    Token guess, before;
};

constexpr int VOTES = 3 * MOST_ORIGINS * 2, STARTS = (LONGEST_START + 1) * (DEEPEST + 1);

int bucket_of(int length) { return BUCKETS[length < LONGEST_BUCKET ? length : LONGEST_BUCKET]; }

class Calibration {
public:
    Vocabulary vocabulary;
    double trials = 0, hits = 0;
    double estimated[10] = {}, hit[10] = {};  // sums by estimate

    Calibration(const double* matches, const double* votes) {
        for (int i = 0; i < ORIGINS * LENGTH_BUCKETS; i++) {
            match_[i].value = matches[i];
            odds_[i] = std::exp(matches[i]);
        }
        for (int i = 0; i < VOTES; i++) vote_[i].value = votes[i];
    }

    double odds(int origin, int length) const { return odds_[origin * LENGTH_BUCKETS + bucket_of(length)]; }

    static Features features(int origin, int length, Token guess, Token before, int depth, double share, int origins,
                             int matches) {
        int level = share < MAJORITY ? 0 : share < UNANIMITY ? 1 : 2;
        int counted = origins < MOST_ORIGINS ? origins : MOST_ORIGINS;
        int first = length - depth < LONGEST_START ? length - depth : LONGEST_START;
        int deep = depth < DEEPEST ? depth : DEEPEST;
        int vote = (level * MOST_ORIGINS + counted - 1) * 2 + (matches > origins);
        return {origin * LENGTH_BUCKETS + bucket_of(length), vote, first * (DEEPEST + 1) + deep, guess, before};
    }

    double estimate(const Features& known) const {
        return estimate(known, vocabulary.get(known.guess), vocabulary.get(known.before));
    }

    double estimate(const Features& known, const TokenWeights& guess, const TokenWeights& before) const {
        double total = match_[known.match].value + vote_[known.vote].value + guess.guess.value + before.before.value +
                       start_[known.start].value;
        total = total < -SURE ? -SURE : total > SURE ? SURE : total;
        return 1 / (1 + std::exp(-total));
    }

    void observe(const Features& known, bool right) {
        double estimated_now = estimate(known), error = right - estimated_now;
        trials += 1;
        hits += right;
        int cell = int(estimated_now * 10);
        cell = cell < 9 ? cell : 9;
        estimated[cell] += estimated_now;
        hit[cell] += right;
        if (std::fabs(error) <= LEAST_ERROR) return;
        match_[known.match].learn(error);
        odds_[known.match] = std::exp(match_[known.match].value);
        vote_[known.vote].learn(error);
        vocabulary.learnt(known.guess).guess.learn(error);
        vocabulary.learnt(known.before).before.learn(error);
        start_[known.start].learn(error);
    }

private:
    Weight match_[ORIGINS * LENGTH_BUCKETS], vote_[VOTES], start_[STARTS];
    double odds_[ORIGINS * LENGTH_BUCKETS];
};

// -- chains ---------------------------------------------------------------------------------------

struct Match {
    const Token* text;
    int32_t position, end, origin, length;
    bool prompt;
    double weight;
};

constexpr int MOST_MATCHES = 2 * KEPT, FETCHED = 3, FETCHED_AHEAD = 6;

// Keeps the voters for the most popular token at this step of a chain; returns how many, and their share of the weight.
int agreeing(Match* voters, int count, int step, double& share) {
    Token tokens[MOST_MATCHES], candidates[MOST_MATCHES], best = -1;
    double votes[MOST_MATCHES], best_weight = 0.0, total = 0.0;
    int alive = 0, different = 0, kept = 0;
    for (int i = 0; i < count; i++) {
        int32_t position = voters[i].position + step;
        if (position >= voters[i].end) continue;
        Token token = voters[i].text[position];
        int at = 0;
        while (at < different && candidates[at] != token) at++;
        if (at == different) {
            candidates[different] = token;
            votes[different++] = 0.0;
        }
        votes[at] += voters[i].weight;
        total += voters[i].weight;
        if (votes[at] >= best_weight) {  // ties: the later one wins
            best = token;
            best_weight = votes[at];
        }
        tokens[alive] = token;
        if (alive != i) voters[alive] = voters[i];
        alive++;
    }
    for (int i = 0; i < alive; i++) {
        if (tokens[i] != best) continue;
        if (kept != i) voters[kept] = voters[i];
        kept++;
    }
    share = alive ? best_weight / total : 0.0;
    return kept;
}

// Returns whether all matches go on with the same token, so that a vote would change nothing.
bool unanimous(const Match* voters, int count, int step) {
    for (int i = 0; i < count; i++) {
        int32_t position = voters[i].position + step;
        if (position >= voters[i].end || voters[i].text[position] != voters[0].text[voters[0].position + step])
            return false;
    }
    return true;
}

// Gives matches their weight in a vote, and asks for the memory of the first weights of their tokens.
void weigh(Match* matches, int count, const Calibration& calibration) {
    for (int i = 0; i < count; i++) {
        Match& match = matches[i];
        match.weight = calibration.odds(match.origin, match.length);
        for (int32_t at = match.position - 1; at < match.position + FETCHED && at < match.end; at++)
            calibration.vocabulary.fetch(match.text[at]);
    }
}

struct Link {
    Token token;
    Features known;
};

// Where the tokens of drafts go; a source of -1 is none.
struct Drafts {
    Token* tokens;
    double* acceptance;
    int32_t* sources;
};

class Row {
public:
    Index index;
    int32_t prompt_tokens;

    Row(int smallest, int largest, const Token* prompt, size_t count)
        : index(smallest, largest), prompt_tokens(int32_t(count)) {
        index.reserve(count + count / 8 + 32);
        index.extend(prompt, count);
        index.catch_up();
    }

    // alive: weighed.
    int build(Match* alive, int count, int limit, double least, const Calibration& calibration, const Drafts& to) {
        bool scored = chain_.empty();
        double acceptance = 1.0;
        const TokenWeights* before = nullptr;
        const Match* leader = nullptr;
        int step = 0, origins = 1;
        for (; step < limit; step++) {
            double share = 1.0;
            if (!leader || !unanimous(alive, count, step)) {
                if (count > 1) count = agreeing(alive, count, step, share);
                if (!count) break;
                leader = alive;
                for (int i = 1; i < count; i++)
                    if (alive[i].weight > leader->weight) leader = alive + i;
                unsigned seen = 0;
                for (int i = 0; i < count; i++) seen |= 1u << alive[i].origin;
                origins = __builtin_popcount(seen);
            }
            int32_t position = leader->position + step;
            if (position >= leader->end) break;
            if (position + FETCHED_AHEAD < leader->end)
                calibration.vocabulary.fetch(leader->text[position + FETCHED_AHEAD]);
            Token guess = leader->text[position];
            Features known = Calibration::features(leader->origin, leader->length + step, guess,
                                                   leader->text[position - 1], step, share, origins, count);
            if (!before) before = &calibration.vocabulary.get(known.before);
            const TokenWeights* weights = &calibration.vocabulary.get(guess);
            acceptance *= calibration.estimate(known, *weights, *before);
            if (acceptance < least) break;
            before = weights;  // the token before the next guess is this one, in all texts that are left
            to.tokens[step] = guess;
            to.acceptance[step] = acceptance;
            to.sources[step] = leader->prompt && position < prompt_tokens ? position : -1;
            if (scored) chain_.push_back({guess, known});
        }
        if (scored) at_ = 0;
        return step;
    }

    // Asks for the memory of the weights that extend() learns from `count` tokens.
    void fetch_weights(const Vocabulary& vocabulary, size_t count) const {
        for (size_t i = at_; i < chain_.size() && i < at_ + count; i++) {
            vocabulary.fetch(chain_[i].known.guess);
            vocabulary.fetch(chain_[i].known.before);
        }
    }

    // Asks for the memory that extend() needs.
    void fetch() const {
        __builtin_prefetch(index.tokens.data() + index.tokens.size());
        if (!chain_.empty()) __builtin_prefetch(chain_.data() + at_);
    }

    void extend(const Token* tokens, size_t count, Calibration& calibration) {
        for (size_t i = 0; i < count && !chain_.empty(); i++) {
            bool right = chain_[at_].token == tokens[i];
            calibration.observe(chain_[at_].known, right);
            at_++;
            if (!right || at_ == chain_.size()) chain_.clear();
        }
        index.extend(tokens, count);
    }

private:
    std::vector<Link> chain_;  // being scored
    size_t at_ = 0;
};

// -- other records' texts -------------------------------------------------------------------------

class Pool {
public:
    explicit Pool(size_t most) : most_(most) { clear(); }

    void add(const Token* text, size_t count, int origin) {
        if (count > most_) count = most_;
        if (count < 4) return;
        uint64_t key = count;
        for (size_t i = 0; i < count; i++) key = mixed(key + uint32_t(text[i]) + 0x9e3779b97f4a7c15ULL);
        if (known_.count(key)) return;
        if (index_->tokens.size() + count > most_) clear();
        known_.insert(key);
        int32_t start = int32_t(index_->tokens.size());
        index_->extend(text, count);
        index_->catch_up();
        documents_.push_back({start, int32_t(index_->tokens.size()), origin});
        numbers_.resize(index_->tokens.size(), int32_t(documents_.size() - 1));
    }

    const Index& index() const { return *index_; }

    void fetch(const Search& search) const {
        for (int i = 0; i < search.count; i++) __builtin_prefetch(&numbers_[search.found[i] - 1]);
    }

    int matches(const Search& search, const Token* end, size_t size, Match* to) const {
        const Token* text = index_->tokens.data();
        int kept = 0;
        for (int i = 0; i < search.count; i++) {
            int32_t position = search.found[i];
            const Document& in = documents_[numbers_[position - 1]];
            int length = agreement(text, position, in.start, end, size);
            if (length > 0 && position < in.end) to[kept++] = {text, position, in.end, in.origin, length, false, 0.0};
        }
        return kept;
    }

private:
    struct Document {
        int32_t start, end;
        int origin;
    };
    size_t most_;
    std::unique_ptr<Index> index_;
    std::vector<Document> documents_;
    std::vector<int32_t> numbers_;  // by token: its document
    std::unordered_set<uint64_t> known_;

    void clear() {
        index_ = std::make_unique<Index>(1, LARGEST_SHARED);
        documents_.clear();
        numbers_.clear();
        known_.clear();
    }
};

// -- drafters -------------------------------------------------------------------------------------

class Drafter {
public:
    Calibration calibration;

    Drafter(int smallest, int largest, bool votes, size_t shared, const double* matches, const double* vote_priors)
        : calibration(matches, vote_priors), smallest_(smallest), largest_(largest), votes_(votes) {
        if (shared) pool_ = std::make_unique<Pool>(shared);
    }

    int64_t open(const Token* prompt, size_t count, const int64_t* spans, size_t passages) {
        auto row = std::make_unique<Row>(smallest_, largest_, prompt, count);
        for (size_t i = 0; pool_ && i < passages; i++)
            if (spans[2 * i] < spans[2 * i + 1])
                pool_->add(prompt + spans[2 * i], size_t(spans[2 * i + 1] - spans[2 * i]), OTHER_CONTEXT);
        if (free_.empty()) {
            free_.push_back(int64_t(rows_.size()));
            rows_.emplace_back();
        }
        int64_t handle = free_.back();
        rows_[handle] = std::move(row);
        free_.pop_back();
        return handle;
    }

    // Adds tokens to rows: a row's handle, how many there are, and they; then the next row's. Row after row, memory is
    // asked for before it is needed.
    void extend(const int32_t* queue, int64_t length) {
        waiting_.clear();
        for (const int32_t* at = queue; at < queue + length; at += 2 + at[1])
            waiting_.push_back({rows_[at[0]].get(), at + 2, size_t(at[1])});
        int64_t several = int64_t(waiting_.size());
        for (int64_t i = -3 * AHEAD; i < several; i++) {
            if (i + 3 * AHEAD < several) __builtin_prefetch(waiting_[i + 3 * AHEAD].row);
            if (i >= -2 * AHEAD && i + 2 * AHEAD < several) waiting_[i + 2 * AHEAD].row->fetch();
            if (i >= -AHEAD && i + AHEAD < several)
                waiting_[i + AHEAD].row->fetch_weights(calibration.vocabulary, waiting_[i + AHEAD].count);
            if (i >= 0) waiting_[i].row->extend(waiting_[i].tokens, waiting_[i].count, calibration);
        }
    }

    // Does what the next drafts do not need.
    void settle() {
        for (auto& row : rows_)
            if (row) row->index.catch_up();
    }

    void close(int64_t handle, bool finished) {
        const std::vector<Token>& text = rows_[handle]->index.tokens;
        size_t start = size_t(rows_[handle]->prompt_tokens);
        if (finished && pool_) pool_->add(text.data() + start, text.size() - start, OTHER_OUTPUT);
        free_.push_back(handle);
        rows_[handle].reset();
    }

    // Drafts for several rows, some of which may be closed (-1), each of at most `longest` tokens; returns how many
    // tokens in all. handles: and behind them the rows' own limits.
    int64_t propose(const int64_t* handles, int64_t several, int64_t longest, double least, const Drafts& to,
                    int64_t* counts) {
        const int64_t* limits = handles + several;
        int64_t total = 0;
        for (int64_t i = 0; i < several; i += SEARCHES) {
            int together = int(several - i < SEARCHES ? several - i : SEARCHES);
            match(handles + i, together);
            for (int64_t row = i + together; row < several && row < i + 2 * SEARCHES; row++)
                if (handles[row] >= 0) __builtin_prefetch(rows_[handles[row]].get());
            for (int j = 0; j < together; j++)
                if (handles[i + j] >= 0) weigh(matches_[j], matched_[j], calibration);
            for (int j = 0; j < together; j++) {
                counts[i + j] = 0;
                if (handles[i + j] < 0) continue;
                Drafts here{to.tokens + total, to.acceptance + total, to.sources + total};
                counts[i + j] = rows_[handles[i + j]]->build(
                    matches_[j], matched_[j], int(std::clamp<int64_t>(limits[i + j], 0, longest)), least, calibration,
                    here);
                total += counts[i + j];
            }
        }
        return total;
    }

private:
    static constexpr int64_t AHEAD = 3;  // rows
    int smallest_, largest_;
    bool votes_;
    std::unique_ptr<Pool> pool_;
    std::vector<std::unique_ptr<Row>> rows_;
    std::vector<int64_t> free_;
    struct Waiting {
        Row* row;
        const Token* tokens;
        size_t count;
    };
    std::vector<Waiting> waiting_;

    Search searches_[SEARCHES];
    Match matches_[SEARCHES][MOST_MATCHES];
    int matched_[SEARCHES];

    // Finds the matches of up to SEARCHES rows.
    void match(const int64_t* handles, int several) {
        Search* going[SEARCHES];
        int count = 0;
        for (int i = 0; i < several; i++) {
            if (handles[i] < 0) continue;
            const Index& index = rows_[handles[i]]->index;
            searches_[i].begin(index, index.tokens.data() + index.tokens.size(), index.tokens.size());
            going[count++] = &searches_[i];
        }
        finish(going, count);
        count = 0;
        for (int i = 0; i < several; i++) {
            matched_[i] = 0;
            if (handles[i] < 0) continue;
            const Row& row = *rows_[handles[i]];
            matched_[i] = own(row, searches_[i], matches_[i]);
            if (!votes_) matched_[i] = longest(matches_[i], matched_[i]);
            if (!pool_ || sure(matches_[i], matched_[i])) continue;
            const std::vector<Token>& text = row.index.tokens;
            searches_[i].begin(pool_->index(), text.data() + text.size(), text.size());
            going[count++] = &searches_[i];
        }
        finish(going, count);
        for (int i = 0; i < count; i++) pool_->fetch(*going[i]);
        for (int i = 0; i < count; i++) {
            int64_t at = going[i] - searches_;
            const std::vector<Token>& text = rows_[handles[at]]->index.tokens;
            matched_[at] += pool_->matches(*going[i], text.data() + text.size(), text.size(),
                                           matches_[at] + matched_[at]);
        }
    }

    static int own(const Row& row, const Search& search, Match* to) {
        const std::vector<Token>& text = row.index.tokens;
        int32_t size = int32_t(text.size());
        const Token* end = text.data() + size;
        int kept = 0;
        for (int i = 0; i < search.count; i++) {
            int32_t position = search.found[i];
            if (position >= size) continue;
            int origin = position < row.prompt_tokens ? PROMPT : OUTPUT;
            to[kept++] = {text.data(), position, size, origin, agreement(text.data(), position, 0, end, text.size()),
                          true, 0.0};
        }
        return kept;
    }

    // Whether a match is long enough to do without other records' texts.
    static bool sure(const Match* matches, int count) {
        return std::any_of(matches, matches + count, [](const Match& match) { return match.length >= SURE_LENGTH; });
    }

    // Keeps the longest match; returns how many are left.
    int longest(Match* matches, int count) const {
        int best = 0;
        auto rank = [this](const Match& match) { return match.length < largest_ ? match.length : largest_; };
        for (int i = 1; i < count; i++)
            if (rank(matches[i]) >= rank(matches[best])) best = i;  // ties: the latest, and positions rise
        if (!count) return 0;
        matches[0] = matches[best];
        matches[0].origin = PROMPT;
        return 1;
    }
};

// -- draft lengths --------------------------------------------------------------------------------

// Sorts probabilities, the highest first.
void sort_descending(const double* values, size_t count, std::vector<double>& sorted) {
    constexpr int BUCKETS_OF = 1024;
    std::vector<uint32_t> ends(BUCKETS_OF + 1, 0);
    auto bucket = [](double value) {
        int number = int(value * BUCKETS_OF);
        return BUCKETS_OF - 1 - (number < 0 ? 0 : number < BUCKETS_OF ? number : BUCKETS_OF - 1);
    };
    for (size_t i = 0; i < count; i++) ends[size_t(bucket(values[i])) + 1]++;
    for (int i = 0; i < BUCKETS_OF; i++) ends[i + 1] += ends[i];
    std::vector<uint32_t> to(ends.begin(), ends.end() - 1);
    sorted.resize(count);
    for (size_t i = 0; i < count; i++) sorted[to[size_t(bucket(values[i]))]++] = values[i];
    for (int i = 0; i < BUCKETS_OF; i++)
        std::sort(sorted.begin() + ends[i], sorted.begin() + ends[i + 1], std::greater<double>());
}

// Writes how many tokens of each row's chain to verify (allocate_flat in draft_length.py). costs: seconds of steps of
// one drafted token, of two, and so on. token_s: seconds of a token beside prompts; negative: there are none.
void allocate(const double* acceptance, const int64_t* counts, int64_t rows, const double* costs, double least_rate,
              double token_s, int64_t* lengths) {
    size_t total = 0, best = 0;
    for (int64_t i = 0; i < rows; i++) total += size_t(counts[i]);
    std::vector<double> ordered;
    sort_descending(acceptance, total, ordered);
    double expected = double(rows), rate = 0.0;
    for (size_t i = 0; i < total; i++) {
        expected += ordered[i];
        if (expected / costs[i] > rate) {
            rate = expected / costs[i];
            best = i + 1;
        }
    }
    if (!(rate > least_rate)) {
        rate = least_rate;
        best = 0;
    }
    bool beside = token_s >= 0;
    if (!beside && !best) {
        std::fill(lengths, lengths + rows, 0);
        return;
    }
    double least = beside ? rate * token_s : ordered[best - 1];
    bool divided = !beside && best < total && ordered[best] == least;  // among equals some are left out
    size_t taken = 0;
    std::vector<std::pair<int64_t, int64_t>> equals;  // depth, row
    for (int64_t row = 0; row < rows; acceptance += counts[row], row++) {
        int64_t length = 0;
        for (int64_t depth = 0; depth < counts[row]; depth++) {
            double value = acceptance[depth];
            if (divided && value == least)
                equals.push_back({depth, row});
            else
                length += beside ? value > least : value >= least;
        }
        lengths[row] = length;
        taken += size_t(length);
    }
    if (!divided) return;
    std::sort(equals.begin(), equals.end());  // the shallower first, so that every choice consists of prefixes
    for (size_t i = 0; taken < best; i++, taken++) lengths[equals[i].second]++;
}

Drafter& at(void* drafter) { return *static_cast<Drafter*>(drafter); }

}  // namespace

// -- functions; -1 or null: out of memory ---------------------------------------------------------

extern "C" {

void* ragspec_drafter(int smallest, int largest, int votes, int64_t shared, const double* matches,
                      const double* vote_priors) {
    try {
        return new Drafter(smallest, largest, votes != 0, size_t(shared), matches, vote_priors);
    } catch (...) {
        return nullptr;
    }
}

void ragspec_drafter_free(void* drafter) { delete static_cast<Drafter*>(drafter); }

int64_t ragspec_drafter_open(void* drafter, const int32_t* prompt, int64_t count, const int64_t* spans,
                             int64_t passages) {
    try {
        return at(drafter).open(prompt, size_t(count), spans, size_t(passages));
    } catch (...) {
        return -1;
    }
}

int64_t ragspec_drafter_extend(void* drafter, const int32_t* queue, int64_t length) {
    try {
        at(drafter).extend(queue, length);
        return 0;
    } catch (...) {
        return -1;
    }
}

int64_t ragspec_drafter_close(void* drafter, int64_t row, int finished) {
    try {
        at(drafter).close(row, finished != 0);
        return 0;
    } catch (...) {
        return -1;
    }
}

int64_t ragspec_drafter_settle(void* drafter) {
    try {
        at(drafter).settle();
        return 0;
    } catch (...) {
        return -1;
    }
}

int64_t ragspec_drafter_propose(void* drafter, const int64_t* rows_and_limits, int64_t several, int64_t longest,
                                double least, int32_t* tokens, double* acceptance, int32_t* sources, int64_t* counts) {
    try {
        return at(drafter).propose(rows_and_limits, several, longest, least, {tokens, acceptance, sources}, counts);
    } catch (...) {
        return -1;
    }
}

// Chooses draft lengths, and moves the tokens that are kept to the front of `kept`; returns how many there are.
int64_t ragspec_drafter_allocate(const double* acceptance, const int64_t* counts, int64_t rows, const double* costs,
                                 double least_rate, double token_s, const int32_t* tokens, int64_t* lengths,
                                 int32_t* kept) {
    try {
        allocate(acceptance, counts, rows, costs, least_rate, token_s, lengths);
        int64_t total = 0;
        for (int64_t row = 0; row < rows; tokens += counts[row], total += lengths[row], row++)
            std::copy(tokens, tokens + lengths[row], kept + total);
        return total;
    } catch (...) {
        return -1;
    }
}

void ragspec_drafter_state(void* drafter, double* to) {
    const auto& calibration = at(drafter).calibration;
    *to++ = calibration.trials;
    *to++ = calibration.hits;
    for (int i = 0; i < 10; i++) *to++ = calibration.estimated[i];
    for (int i = 0; i < 10; i++) *to++ = calibration.hit[i];
}

}
