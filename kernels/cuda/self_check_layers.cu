// Self-check of what works on rows: embedding, norms, products, SwiGLU, cross-entropy.
#include "self_check.cuh"

namespace self_check {

// ------------------------------------------------------------------------------------------------
// Rows, embedding

struct RowOf {
    const floatX *x;
    const int32_t *rows;
    int C;
    __device__ Want operator()(int64_t i) const {
        return {at(x, rows[i / C] * (int64_t)C + i % C), 0};
    }
};

// Row t = rows[k] of the result is row k, every other row is 0.
struct ScatteredRow {
    const floatX *x;
    const int32_t *rows;
    int n, C;
    __device__ Want operator()(int64_t i) const {
        for (int k = 0; k < n; k++)
            if (rows[k] == i / C) return {at(x, (int64_t)k * C + i % C), 0};
        return {0, 0};
    }
};

struct TokenGradient {
    const real *start;
    const floatX *dout;
    const int32_t *tokens;
    int T, C;
    __device__ Want operator()(int64_t i) const {
        double sum = start[i], size = fabs(sum);
        for (int t = 0; t < T; t++)
            if (tokens[t] == i / C) {
                const double x = at(dout, (int64_t)t * C + i % C);
                sum += x, size += fabs(x);
            }
        return {sum, FP32 * size};
    }
};

void check_rows(const Packed &p) {
    const int n = p.rows / 2, C = p.C;
    int32_t every_second[SOME_ROWS];
    for (int k = 0; k < n; k++) every_second[k] = 2 * k + 1;
    const int32_t *rows = on_device(every_second, n);
    floatX *all = random_bf16((int64_t)p.rows * C, 1), *some = take_n<floatX>((int64_t)n * C);
    floatX *back = take_n<floatX>((int64_t)p.rows * C);
    checking("gather_rows");
    gather_rows(some, all, rows, n, C);
    expect("out", some, (int64_t)n * C, RowOf{all, rows, C}, true);
    checking("scatter_rows");
    scatter_rows(back, some, rows, n, p.rows, C);
    expect("out", back, (int64_t)p.rows * C, ScatteredRow{some, rows, n, C}, true);
}

void check_embedding(const Packed &p) {
    const int C = p.C < 256 ? p.C : 256;  // all of a large embedding would take long
    const int64_t n = (int64_t)p.T * C, num_weights = (int64_t)p.V * C;
    floatX *weight = random_bf16(num_weights, 1), *out = take_n<floatX>(n);
    floatX *dout = random_bf16(n, 1);
    real *dweight = random_real(num_weights, 1), *start = copy_of(dweight, num_weights);
    checking("embedding_forward");
    embedding_forward(out, p.tokens, weight, p.T, C);
    expect("out", out, n, RowOf{weight, p.tokens, C}, true);
    checking("embedding_backward");
    embedding_backward(dweight, dout, p.tokens, p.order, p.T, C);
    expect("dweight", dweight, num_weights, TokenGradient{start, dout, p.tokens, p.T, C});
}

// ------------------------------------------------------------------------------------------------
// RMSNorm

struct Rstd {
    const floatX *resid;
    double eps;
    int C;
    __device__ Want operator()(int64_t t) const {
        double squares = 0;
        for (int c = 0; c < C; c++) squares += at(resid, t * C + c) * at(resid, t * C + c);
        const double rstd = 1 / sqrt(squares / C + eps);
        return {rstd, FP32 * rstd};
    }
};

struct Normed {
    const floatX *resid, *weight;
    const real *rstd;
    int C;
    __device__ Want operator()(int64_t i) const {
        const double x = at(resid, i) * rstd[i / C] * at(weight, i % C);
        return {x, FP32 * fabs(x)};
    }
};

// d normed / d resid, of y = x rstd(x) w: rstd (g - y0 mean(g y0)), g = dnormed w, y0 = x rstd
struct NormGradient {
    const floatX *start, *dnormed, *resid, *weight;
    const real *rstd;
    int C;
    __device__ Want operator()(int64_t i) const {
        const int64_t row = i / C * C;
        const double r = rstd[i / C], g = at(dnormed, i) * at(weight, i % C), y = at(resid, i) * r;
        double sum = 0, size = 0;
        for (int c = 0; c < C; c++) {
            const double term = at(dnormed, row + c) * at(weight, c) * at(resid, row + c) * r;
            sum += term, size += fabs(term);
        }
        return {at(start, i) + r * (g - y * sum / C),
                FP32 * (fabs(at(start, i)) + r * (fabs(g) + fabs(y) * size / C))};
    }
};

struct NormWeightGradient {
    const real *start;
    const floatX *dnormed, *resid;
    const real *rstd;
    int T, C;
    __device__ Want operator()(int64_t c) const {
        double sum = start[c], size = fabs(sum);
        for (int t = 0; t < T; t++) {
            const int64_t i = (int64_t)t * C + c;
            const double term = at(dnormed, i) * at(resid, i) * rstd[t];
            sum += term, size += fabs(term);
        }
        return {sum, FP32 * size};
    }
};

void check_norms(const Packed &p) {
    const int T = p.rows, C = p.C;
    const int64_t n = (int64_t)T * C;
    const float eps = 1e-5f;
    floatX *resid = random_bf16(n, 1), *weight = random_bf16(C, 1), *normed = take_n<floatX>(n);
    floatX *dnormed = random_bf16(n, 1), *dresid = random_bf16(n, 1), *start = copy_of(dresid, n);
    real *rstd = take_n<real>(T), *dweight = random_real(C, 1),
         *dweight_start = copy_of(dweight, C);
    checking("rmsnorm_forward");
    rmsnorm_forward(normed, rstd, resid, weight, eps, T, C);
    expect("rstd", rstd, T, Rstd{resid, eps, C});
    expect("normed", normed, n, Normed{resid, weight, rstd, C});
    checking("rmsnorm_backward");
    rmsnorm_backward(dresid, dweight, dnormed, resid, weight, rstd, T, C);
    expect("dresid", dresid, n, NormGradient{start, dnormed, resid, weight, rstd, C});
    expect("dweight", dweight, C, NormWeightGradient{dweight_start, dnormed, resid, rstd, T, C});
}

// ------------------------------------------------------------------------------------------------
// The norm of query and key heads, bias

// Element i of (T,H+2*Hkv,D): its head, the weights of that, and the head's 1/sqrt(mean + eps)
struct HeadNorm {
    HeadShape heads;
    const floatX *inp, *weight;
    double eps;
    __device__ int part(int64_t i) const {  // 0: queries, 1: keys, 2: values
        const int head = (int)(i / heads.head_dim % (heads.num_heads + 2 * heads.num_kv_heads));
        return head < heads.num_heads ? 0 : head < heads.num_heads + heads.num_kv_heads ? 1 : 2;
    }
    __device__ double w(int64_t i) const {
        return at(weight, part(i) * heads.head_dim + i % heads.head_dim);
    }
    __device__ double rstd(int64_t i) const {
        return Rstd{inp, eps, heads.head_dim}(i / heads.head_dim).value;
    }
};

struct HeadNormed : HeadNorm {
    __device__ Want operator()(int64_t i) const {
        const double x = at(inp, i);
        return {part(i) == 2 ? x : x * rstd(i) * w(i), FP32 * fabs(x * rstd(i))};
    }
};

// As NormGradient
struct HeadGradient : HeadNorm {
    const floatX *start;
    __device__ Want operator()(int64_t i) const {
        const int D = heads.head_dim;
        const int64_t row = i / D * D;
        if (part(i) == 2) return {at(start, i), 0};
        const double r = rstd(i), g = at(start, i) * w(i), y = at(inp, i) * r;
        double sum = 0, size = 0;
        for (int64_t k = row; k < row + D; k++) {
            const double term = at(start, k) * w(k) * at(inp, k) * r;
            sum += term, size += fabs(term);
        }
        return {r * (g - y * sum / D), FP32 * r * (fabs(g) + fabs(y) * size / D)};
    }
};

struct HeadWeightGradient : HeadNorm {
    const floatX *start;
    const real *dweight;
    int64_t n;
    __device__ Want operator()(int64_t c) const {
        double sum = dweight[c], size = fabs(sum);
        for (int64_t i = c % heads.head_dim; i < n; i += heads.head_dim) {
            const double term = part(i) == c / heads.head_dim ? at(start, i) * at(inp, i) : 0;
            sum += term ? term * rstd(i) : 0, size += term ? fabs(term) * rstd(i) : 0;
        }
        return {sum, FP32 * size};
    }
};

void check_qk_norm(const Packed &p) {
    const HeadShape h = p.heads;
    const int D = h.head_dim, T = p.rows;
    const int64_t n = (int64_t)T * (h.num_heads + 2 * h.num_kv_heads) * D;
    const float eps = 1e-5f;
    floatX *inp = random_bf16(n, 1), *weight = random_bf16(2 * D, 1), *out = take_n<floatX>(n),
           *dqkv = random_bf16(n, 1), *start = copy_of(dqkv, n);
    real *dweight = random_real(2 * D, 1), *dweight_start = copy_of(dweight, 2 * D);
    const HeadNorm norm = {h, inp, weight, eps};
    checking("qk_norm_forward");
    qk_norm_forward(out, inp, weight, eps, T, h);
    expect("out", out, n, HeadNormed{norm});
    checking("qk_norm_backward");
    qk_norm_backward(dqkv, dweight, inp, weight, eps, T, h);
    expect("dqkv", dqkv, n, HeadGradient{norm, start});
    expect("dweight", dweight, 2 * D, HeadWeightGradient{norm, start, dweight_start, n});
}

struct Biased {
    const floatX *start, *bias;
    int N;
    __device__ Want operator()(int64_t i) const {
        const double x = at(start, i), b = at(bias, i % N);
        return {x + b, FP32 * (fabs(x) + fabs(b))};
    }
};

struct BiasGradient {
    const real *start;
    const floatX *dout;
    int T, N;
    __device__ Want operator()(int64_t c) const {
        double sum = start[c], size = fabs(sum);
        for (int t = 0; t < T; t++) {
            const double x = at(dout, (int64_t)t * N + c);
            sum += x, size += fabs(x);
        }
        return {sum, FP32 * size};
    }
};

void check_bias(const Packed &p) {
    const int T = p.rows, N = p.C;
    const int64_t n = (int64_t)T * N;
    floatX *out = random_bf16(n, 1), *bias = random_bf16(N, 1), *start = copy_of(out, n);
    real *dbias = random_real(N, 1), *dbias_start = copy_of(dbias, N);
    checking("bias_forward");
    bias_forward(out, bias, T, N);
    expect("out", out, n, Biased{start, bias, N});
    checking("bias_backward");
    bias_backward(dbias, out, T, N);
    expect("dbias", dbias, N, BiasGradient{dbias_start, out, T, N});
}

// ------------------------------------------------------------------------------------------------
// Matmul, SwiGLU

// start or resid (rows, cols) + the sum over k < depth of
// a[row a_row + k a_step] b[col b_row + k b_step]
struct Product {
    const real *start;  // NULL: 0
    const floatX *resid, *a, *b;
    int64_t cols, depth, a_row, a_step, b_row, b_step;
    __device__ Want operator()(int64_t i) const {
        double sum = start ? start[i] : resid ? at(resid, i) : 0, size = fabs(sum);
        for (int64_t k = 0; k < depth; k++) {
            const double term =
                at(a, i / cols * a_row + k * a_step) * at(b, i % cols * b_row + k * b_step);
            sum += term, size += fabs(term);
        }
        return {sum, FP32 * size};
    }
};

void check_matmul(const Packed &p) {
    const int64_t T = p.T, K = p.C, N = p.F;
    floatX *inp = random_bf16(T * K, 1), *weight = random_bf16(N * K, 1),
           *dout = random_bf16(T * N, 1);
    floatX *out = take_n<floatX>(T * N), *dinp = take_n<floatX>(T * K);
    floatX *resid = random_bf16(T * N, 1);
    real *dweight = random_real(N * K, 1), *start = copy_of(dweight, N * K);
    checking("matmul_forward");
    matmul_forward(out, inp, weight, T, K, N);
    expect("out", out, T * N, Product{NULL, NULL, inp, weight, N, K, K, 1, K, 1});
    checking("matmul_forward_add");
    matmul_forward_add(out, resid, inp, weight, T, K, N);
    expect("out", out, T * N, Product{NULL, resid, inp, weight, N, K, K, 1, K, 1});
    checking("matmul_backward_input");
    matmul_backward_input(dinp, dout, weight, T, K, N);
    expect("dinp", dinp, T * K, Product{NULL, NULL, dout, weight, K, N, N, 1, 1, K});
    checking("matmul_backward_weight");
    for (const real *before : {(const real *)start, (const real *)NULL}) {
        matmul_backward_weight(dweight, dout, inp, before != NULL, T, K, N);
        expect("dweight", dweight, N * K, Product{before, NULL, dout, inp, K, T, 1, N, 1, K});
    }
}

struct Swiglu {
    const floatX *gate_up;
    int64_t F;
    __device__ Want operator()(int64_t i) const {
        const double gate = at(gate_up, i / F * 2 * F + i % F),
                     up = at(gate_up, i / F * 2 * F + F + i % F);
        return {gate / (1 + exp(-gate)) * up, FP32 * fabs(gate * up)};
    }
};

struct SwigluGradient {
    const floatX *dout, *gate_up;
    int64_t F;
    __device__ Want operator()(int64_t i) const {
        const int64_t row = i / (2 * F), col = i % (2 * F), c = col % F;
        const double gate = at(gate_up, row * 2 * F + c), up = at(gate_up, row * 2 * F + F + c);
        const double d = at(dout, row * F + c), s = 1 / (1 + exp(-gate));
        if (col >= F) return {d * gate * s, FP32 * fabs(d * gate)};
        return {d * up * s * (1 + gate * (1 - s)), FP32 * fabs(d * up) * (1 + fabs(gate))};
    }
};

void check_swiglu(const Packed &p) {
    const int64_t T = p.rows, F = p.F;
    floatX *gate_up = random_bf16(2 * T * F, 8), *out = take_n<floatX>(T * F);
    floatX *dout = random_bf16(T * F, 1), *dgate_up = take_n<floatX>(2 * T * F);
    checking("swiglu_forward");
    swiglu_forward(out, gate_up, T, F);
    expect("out", out, T * F, Swiglu{gate_up, F});
    checking("swiglu_backward");
    swiglu_backward(dgate_up, dout, gate_up, T, F);
    expect("dgate_up", dgate_up, 2 * T * F, SwigluGradient{dout, gate_up, F});
}

// ------------------------------------------------------------------------------------------------
// Cross-entropy

struct CrossEntropy {
    const floatX *logits;
    const int32_t *targets;
    int V;
    __device__ double lse(int64_t t) const {
        double top = -INFINITY, sum = 0;
        for (int v = 0; v < V; v++) top = fmax(top, at(logits, t * V + v));
        for (int v = 0; v < V; v++) sum += exp(at(logits, t * V + v) - top);
        return top + log(sum);
    }
};

struct Loss : CrossEntropy {
    __device__ Want operator()(int64_t t) const {
        if (targets[t] < 0) return {0, 0};
        const double target = at(logits, t * V + targets[t]);
        return {lse(t) - target, FP32 * (fabs(lse(t)) + fabs(target))};
    }
};

struct LogitGradient : CrossEntropy {
    const double *lses;  // of each row
    const real *loss_scale;
    __device__ Want operator()(int64_t i) const {
        const int64_t t = i / V;
        if (targets[t] < 0) return {0, 0};
        const double p = exp(at(logits, i) - lses[t]);
        return {(p - (targets[t] == i % V)) * *loss_scale,
                FP32 * (p + (targets[t] == i % V)) * *loss_scale};
    }
};

struct RowLse : CrossEntropy {
    __device__ double operator()(int64_t t) const { return lse(t); }
};

struct LossSum {
    const real *losses;
    int64_t T;
    double start;
    __device__ Want operator()(int64_t) const {
        double sum = start;
        for (int64_t t = 0; t < T; t++) sum += losses[t];
        return {sum, FP32 * sum};
    }
};

void check_cross_entropy(const Packed &p) {
    const int64_t T = p.rows, V = p.V;
    int32_t host[SOME_ROWS];
    for (int t = 0; t < T; t++)
        host[t] = t % 5 == 3 ? -1 : (int32_t)(mix64((uint64_t)t) % (uint64_t)V);
    const float scale = 1.0f / 32;
    const double start = 3;
    const int32_t *targets = on_device(host, T);
    const real *loss_scale = on_device(&scale, 1);
    floatX *logits = random_bf16(T * V, 8), *dlogits = copy_of(logits, T * V);
    real *losses = take_n<real>(T), *again = take_n<real>(T);
    double *lses = take_n<double>(T), *sum = on_device(&start, 1);
    const CrossEntropy c = {logits, targets, (int)V};
    compute(lses, T, RowLse{c});
    checking("cross_entropy_forward");
    cross_entropy_forward(losses, logits, targets, T, V);
    expect("losses", losses, T, Loss{c});
    checking("losses_sum");
    losses_sum(sum, losses, T);
    expect("sum", sum, 1, LossSum{losses, T, start});
    checking("cross_entropy_forward_backward");
    cross_entropy_forward_backward(again, dlogits, targets, loss_scale, T, V);
    expect("losses", again, T, Loss{c});
    expect("dlogits", dlogits, T * V, LogitGradient{c, lses, loss_scale});
}

}  // namespace self_check
