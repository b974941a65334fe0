// Self-check of RoPE, attention and the key-value cache.
#include "self_check.cuh"

namespace self_check {

// A value and its partner turned by the angle whose cosine and sine are table[0], table[1]; back:
// by minus that. `high`: the result is the second of the pair.
__device__ Want turned(Want low, Want high, const real *table, bool back, bool is_high) {
    const double c = table[0], s = back ? -table[1] : table[1];
    const Want &own = is_high ? high : low, &other = is_high ? low : high;
    const double x = own.value * c, y = other.value * (is_high ? s : -s);
    return {x + y,
            own.tolerance * fabs(c) + other.tolerance * fabs(s) + FP32 * (fabs(x) + fabs(y))};
}

// Element i of (T,H+2*Hkv,D)
struct QkvPlace {
    int64_t t;
    int head, d, low, high;  // low, high: columns of the pair that RoPE turns
    const real *table;       // cosine and sine of that pair
    __device__ QkvPlace(int64_t i, HeadShape h, const int32_t *position_ids,
                        const real *rope_table) {
        const int heads = h.num_heads + 2 * h.num_kv_heads, half = h.head_dim / 2;
        t = i / h.head_dim / heads;
        head = (int)(i / h.head_dim % heads), d = (int)(i % h.head_dim);
        low = d % half, high = low + half;
        table = rope_table + ((int64_t)position_ids[t] * half + low) * 2;
    }
};

struct Roped {
    const floatX *start;
    const int32_t *position_ids;
    const real *rope_table;
    HeadShape heads;
    __device__ Want operator()(int64_t i) const {
        const QkvPlace p(i, heads, position_ids, rope_table);
        if (p.head >= heads.num_heads + heads.num_kv_heads) return {at(start, i), 0};
        return turned({at(start, i - p.d + p.low), 0}, {at(start, i - p.d + p.high), 0}, p.table,
                      false, p.d == p.high);
    }
};

// Attention's operands, and its intermediate results in full: (H, T, max_len), the last index being
// a key's position in the document
struct Attention {
    HeadShape heads;
    int T, max_len;
    const int32_t *first, *end, *position_ids;
    const real *rope_table, *lse;
    const floatX *qkv, *out, *dout;
    Want *scores, *dscores;

    __device__ int group() const { return heads.num_heads / heads.num_kv_heads; }
    __device__ double scale() const { return 1 / sqrt((double)heads.head_dim); }
    __device__ int64_t row(int64_t t, int head) const {  // of qkv
        return (t * (heads.num_heads + 2 * heads.num_kv_heads) + head) * heads.head_dim;
    }
    __device__ int64_t key(int64_t t, int h) const { return row(t, heads.num_heads + h / group()); }
    __device__ int64_t value(int64_t t, int h) const {
        return row(t, heads.num_heads + heads.num_kv_heads + h / group());
    }
    __device__ int64_t out_row(int64_t t, int h) const {
        return (t * heads.num_heads + h) * heads.head_dim;
    }
    __device__ int64_t pair(int h, int64_t t, int j) const {
        return (h * (int64_t)T + t) * max_len + j;
    }
    __device__ int last(int64_t t) const { return (int)(t - first[t]); }  // key that t attends to
    __device__ double p(int h, int64_t t, int j) const {
        return exp(scores[pair(h, t, j)].value - lse[(int64_t)h * T + t]);
    }
    __device__ Want dot(const floatX *x, int64_t i, const floatX *y, int64_t j) const {
        double sum = 0, size = 0;
        for (int d = 0; d < heads.head_dim; d++) {
            const double term = at(x, i + d) * at(y, j + d);
            sum += term, size += fabs(term);
        }
        return {sum, FP32 * size};
    }
};

struct Scores : Attention {
    __device__ Want operator()(int64_t i) const {
        const int j = (int)(i % max_len), h = (int)(i / max_len / T);
        const int64_t t = i / max_len % T;
        if (j > last(t)) return {-INFINITY, 0};
        const Want s = dot(qkv, row(t, h), qkv, key(first[t] + j, h));
        return {s.value * scale(), s.tolerance * scale()};
    }
};

struct Lse : Attention {
    __device__ Want operator()(int64_t i) const {
        const Want *s = scores + i * max_len;
        double top = -INFINITY, sum = 0, tolerance = 0;
        for (int j = 0; j <= last(i % T); j++) top = fmax(top, s[j].value);
        for (int j = 0; j <= last(i % T); j++) {
            sum += exp(s[j].value - top);
            tolerance = fmax(tolerance, s[j].tolerance);
        }
        return {top + log(sum), tolerance + FP32 * (1 + fabs(top))};
    }
};

// A sum whose terms have been rounded to bf16
struct RoundedSum {
    double sum = 0, squares = 0, tolerance = 0;
    __device__ void add(double term, double its_tolerance) {
        sum += term, squares += term * term, tolerance += its_tolerance + FP32 * fabs(term);
    }
    __device__ Want want() const { return {sum, 4 * BF16 * sqrt(squares) + tolerance}; }
};

struct AttentionOut : Attention {
    __device__ Want operator()(int64_t i) const {
        const int d = (int)(i % heads.head_dim), h = (int)(i / heads.head_dim % heads.num_heads);
        const int64_t t = i / heads.head_dim / heads.num_heads;
        RoundedSum sum;
        for (int j = 0; j <= last(t); j++) {
            const double term = p(h, t, j) * at(qkv, value(first[t] + j, h) + d);
            sum.add(term, fabs(term) * scores[pair(h, t, j)].tolerance);
        }
        return sum.want();
    }
};

// dS = P (dP - delta), delta = rowsum(dout * out)
struct ScoreGradients : Attention {
    __device__ Want operator()(int64_t i) const {
        const int j = (int)(i % max_len), h = (int)(i / max_len / T);
        const int64_t t = i / max_len % T;
        if (j > last(t)) return {0, 0};
        const Want dp = dot(dout, out_row(t, h), qkv, value(first[t] + j, h));
        const Want delta = dot(dout, out_row(t, h), out, out_row(t, h));
        const double ds = p(h, t, j) * (dp.value - delta.value);
        return {ds, fabs(ds) * scores[i].tolerance + p(h, t, j) * (dp.tolerance + delta.tolerance)};
    }
};

struct QkvGradient : Attention {
    __device__ Want query(int64_t t, int h, int d) const {
        RoundedSum sum;
        for (int j = 0; j <= last(t); j++) {
            const Want ds = dscores[pair(h, t, j)];
            const double k = at(qkv, key(first[t] + j, h) + d) * scale();
            sum.add(ds.value * k, ds.tolerance * fabs(k));
        }
        return sum.want();
    }
    // of key or value head `kv`: the sum over the queries of its group that attend to token t
    __device__ Want key_or_value(int64_t t, int kv, int d, bool is_value) const {
        const int j = last(t);
        RoundedSum sum;
        for (int h = kv * group(); h < (kv + 1) * group(); h++)
            for (int64_t other = t; other < end[t]; other++) {
                const Want ds = dscores[pair(h, other, j)];
                const double q = at(qkv, row(other, h) + d) * scale();
                const double term = p(h, other, j) * at(dout, out_row(other, h) + d);
                if (is_value)
                    sum.add(term, fabs(term) * scores[pair(h, other, j)].tolerance);
                else
                    sum.add(ds.value * q, ds.tolerance * fabs(q));
            }
        return sum.want();
    }
    __device__ Want operator()(int64_t i) const {
        const QkvPlace x(i, heads, position_ids, rope_table);
        const int kv = x.head - heads.num_heads, v = kv - heads.num_kv_heads;
        if (v >= 0) return key_or_value(x.t, v, x.d, true);
        const Want low = kv < 0 ? query(x.t, x.head, x.low) : key_or_value(x.t, kv, x.low, false);
        const Want high =
            kv < 0 ? query(x.t, x.head, x.high) : key_or_value(x.t, kv, x.high, false);
        return turned(low, high, x.table, true, x.d == x.high);
    }
};

template <class F>
static F with(const Attention &a) {
    F f;
    static_cast<Attention &>(f) = a;
    return f;
}

void check_rope(const Packed &p) {
    const HeadShape h = p.heads;
    const int64_t n = (int64_t)p.T * (h.num_heads + 2 * h.num_kv_heads) * h.head_dim;
    floatX *qkv = random_bf16(n, 1), *start = copy_of(qkv, n);
    checking("rope_forward");
    rope_forward(qkv, p.position_ids, p.rope_table, p.T, h);
    expect("qkv", qkv, n, Roped{start, p.position_ids, p.rope_table, h});
}

static int64_t num_outputs(const Packed &p) {  // of attention
    return (int64_t)p.T * p.heads.num_heads * p.heads.head_dim;
}
static int64_t num_keys_and_values(const Packed &p) {
    return 2 * (int64_t)p.T * p.heads.num_kv_heads * p.heads.head_dim;
}

// Random operands, and the results of attention_forward with the scores they should be made of
static Attention attend(const Packed &p) {
    const int64_t n_out = num_outputs(p), n_lse = (int64_t)p.T * p.heads.num_heads;
    real *lse = take_n<real>(n_lse);
    floatX *qkv = random_bf16(n_out + num_keys_and_values(p), 2), *dout = random_bf16(n_out, 1),
           *out = take_n<floatX>(n_out);
    Want *scores = take_n<Want>(n_lse * p.max_len), *dscores = take_n<Want>(n_lse * p.max_len);
    const Attention a = {p.heads, p.T, p.max_len, p.first, p.end,  p.position_ids, p.rope_table,
                         lse,     qkv, out,       dout,    scores, dscores};
    attention_forward(out, lse, qkv, &p.docs, p.heads);
    compute(scores, n_lse * p.max_len, with<Scores>(a));
    return a;
}

void check_attention(const Packed &p) {
    static char name[48];
    const int64_t n_out = num_outputs(p), n_qkv = n_out + num_keys_and_values(p);
    const int64_t n_lse = (int64_t)p.T * p.heads.num_heads;
    snprintf(name, sizeof name, "attention_forward (%s)", attention_describe());
    checking(name);
    const Attention a = attend(p);
    expect("lse", a.lse, n_lse, with<Lse>(a));
    expect("out", a.out, n_out, with<AttentionOut>(a));
    if (found_wrong()) return;
    floatX *dqkv = take_n<floatX>(n_qkv);
    real *delta = take_n<real>(n_lse);
    snprintf(name, sizeof name, "attention_backward (%s)", attention_describe());
    attention_backward(dqkv, delta, a.dout, a.qkv, a.out, a.lse, p.position_ids, p.rope_table,
                       &p.docs, p.heads);
    compute(a.dscores, n_lse * p.max_len, with<ScoreGradients>(a));
    expect("dqkv", dqkv, n_qkv, with<QkvGradient>(a));
}

// In the cache a document begins one row after its first token.
struct CacheStart {
    const int32_t *first;
    __device__ int32_t operator()(int64_t t) const { return first[t] + 1; }
};
struct CachedRows : Attention {
    __device__ Want operator()(int64_t i) const {
        const int width = 2 * heads.num_kv_heads * heads.head_dim;
        return {at(qkv, row(i / width, heads.num_heads) + i % width), 0};
    }
};

// After check_attention: decoding finds all tokens of a document in the cache, and attends alike.
void check_cache(const Packed &p) {
    const int64_t n = num_keys_and_values(p), width = n / p.T;
    const Attention a = attend(p);
    int32_t *first_rows = take_n<int32_t>(p.T);
    floatX *cache = take_n<floatX>(width + n), *out = take_n<floatX>(num_outputs(p));
    compute(first_rows, p.T, CacheStart{p.first});
    checking("kv_store");
    kv_store(cache, a.qkv, first_rows, p.position_ids, p.T, p.heads);
    expect("cache", cache + width, n, with<CachedRows>(a), true);
    if (found_wrong()) return;
    checking("attention_decode");
    attention_decode(out, a.qkv, cache, first_rows, p.position_ids, p.T, p.heads);
    expect("out", out, num_outputs(p), with<AttentionOut>(a));
}

}  // namespace self_check
