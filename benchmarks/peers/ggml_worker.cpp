// ggml or ik_llama.cpp (same API, other kernels) as a worker; the protocol is in compare.py.
// One graph: two products and silu(gate)*up, or ik_llama.cpp's operation that fuses all three; and the down projection of a
// whole MLP. A linear layer is the first product alone. Of a mixture, the products pick each row's experts, ik_llama.cpp's
// operation is always the fused one, and the weighted sum follows, each as the libraries' own models have it.

#include "ggml.h"
#if __has_include("ggml-cpu.h") // ggml; ik_llama.cpp has everything in ggml.h
#include "ggml-cpu.h"
#define GGML_UPSTREAM
#endif

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

struct Peer {
    const char * name;
    ggml_type type;
    bool fused;
};

static const Peer PEERS[] = {
#ifdef GGML_UPSTREAM
    {"ggml-nvfp4", GGML_TYPE_NVFP4, false},
    {"ggml-f16", GGML_TYPE_F16, false},
#else
    {"ik-q4_0_r8", GGML_TYPE_Q4_0_R8, false},
    {"ik-q4_k_r4-fused", GGML_TYPE_Q4_K_R4, true},
#endif
};

template <class T> static std::vector<T> read(const std::string & path, size_t count) {
    std::vector<T> data(count);
    std::ifstream file(path, std::ios::binary);
    if (!file.read(reinterpret_cast<char *>(data.data()), count * sizeof(T))) {
        std::fprintf(stderr, "%s: missing or too short\n", path.c_str());
        std::exit(2);
    }
    return data;
}

#ifdef GGML_UPSTREAM
// 36 bytes for 64 elements: four e4m3 scales; then, per 16 elements, 8 bytes that pair element j with j+8.
static std::vector<uint8_t> pack_nvfp4(const std::string & base, int64_t n, int64_t k) {
    const auto codes = read<uint8_t>(base + ".codes", n * k / 2);
    const auto scales = read<uint8_t>(base + ".scales", n * k / 16);
    std::vector<uint8_t> packed(n * k / 64 * 36);
    for (size_t block = 0; block < packed.size() / 36; block++) {
        uint8_t * out = &packed[block * 36];
        std::memcpy(out, &scales[block * 4], 4);
        for (int sub = 0; sub < 4; sub++) {
            const uint8_t * in = &codes[block * 32 + sub * 8];
            const auto code = [in](int j) { return in[j / 2] >> (j % 2 * 4) & 15; };
            for (int j = 0; j < 8; j++) out[4 + sub * 8 + j] = code(j) | code(j + 8) << 4;
        }
    }
    return packed;
}
#endif

static std::vector<uint8_t> pack(ggml_type type, const std::string & base, int64_t n, int64_t k) {
#ifdef GGML_UPSTREAM
    if (type == GGML_TYPE_NVFP4) return pack_nvfp4(base, n, k);
#endif
    const auto values = read<float>(base + ".f32", n * k);
    std::vector<uint8_t> packed(ggml_row_size(type, k) * n);
    ggml_quantize_chunk(type, values.data(), packed.data(), 0, n, k, nullptr);
    return packed;
}

int main(int argc, char ** argv) {
    if (argc != 11) {
        std::fprintf(stderr, "usage: %s PEER FOLDER M N K COLD_BYTES THREADS OP EXPERTS TOP_K\n", argv[0]);
        return 2;
    }
    const Peer * peer = nullptr;
    for (const Peer & p : PEERS) {
        if (!std::strcmp(p.name, argv[1])) peer = &p;
    }
    if (!peer) {
        std::fprintf(stderr, "no peer is called %s\n", argv[1]);
        return 2;
    }
    const std::string folder = argv[2];
    const int64_t m = std::atoll(argv[3]), n = std::atoll(argv[4]), k = std::atoll(argv[5]);
    const size_t cold_bytes = std::atoll(argv[6]);
    const int threads = std::atoi(argv[7]);
    const std::string op = argv[8], operands = folder + "/" + argv[3] + "/";
    const int64_t experts = std::atoll(argv[9]), top_k = std::atoll(argv[10]);
    const bool linear = op == "linear", moe = op == "moe", mlp = moe || op == "mlp";
#ifdef GGML_UPSTREAM
    ggml_cpu_init();
#endif

    const auto some = [&](bool wanted, const char * name, int64_t rows, int64_t columns) {
        return wanted ? pack(peer->type, folder + name, experts * rows, columns) : std::vector<uint8_t>();
    };
    const auto gate = some(true, "/b1", n, k), up = some(!linear, "/b2", n, k), down = some(mlp, "/b3", k, n);
    const size_t weights_bytes = gate.size() + up.size() + down.size(), sets = 1 + cold_bytes / weights_bytes;
    // Three of what is between, and as many of what the experts make: as it comes, weighted, in sum.
    const size_t graph_bytes = weights_bytes + 3 * top_k * m * (n + k) * sizeof(float) + (1 << 20);
    ggml_context * ctx = ggml_init({(sets + 1) * graph_bytes, nullptr, false});
    const auto weights = [&](const std::vector<uint8_t> & packed, int64_t rows, int64_t columns) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx, peer->type, columns, rows, experts);
        std::memcpy(t->data, packed.data(), packed.size());
        return t;
    };
    // Numbers of four bytes: A, the experts of each row and their weights.
    const auto input = [&](const char * name, ggml_type type, int64_t n0, int64_t n1, int64_t n2) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx, type, n0, n1, n2);
        std::memcpy(t->data, read<float>(operands + name, n0 * n1 * n2).data(), ggml_nbytes(t));
        return t;
    };
    ggml_tensor * a = input("a.f32", GGML_TYPE_F32, k, moe ? 1 : m, moe ? m : 1), *ids = nullptr, *router = nullptr;
    if (moe) {
        ids = input("ids.i32", GGML_TYPE_I32, top_k, m, 1);
        router = input("router.f32", GGML_TYPE_F32, 1, top_k, m);
    }
    const auto product = [&](ggml_tensor * b, ggml_tensor * x) {
        return moe ? ggml_mul_mat_id(ctx, b, x, ids) : ggml_mul_mat(ctx, b, x);
    };
    std::vector<ggml_cgraph *> graphs;
    std::vector<uint8_t> work;
    ggml_tensor * c = nullptr;
    for (size_t set = 0; set < sets; set++) {
        ggml_tensor * b1 = weights(gate, n, k);
        if (linear) {
            c = product(b1, a);
        } else {
            ggml_tensor * b2 = weights(up, n, k);
            c = nullptr;
#ifndef GGML_UPSTREAM
            if (moe) c = ggml_moe_up_gate(ctx, b2, b1, a, ids, GGML_UNARY_OP_SILU);
            else if (peer->fused) c = ggml_fused_up_gate(ctx, b2, b1, a, GGML_UNARY_OP_SILU);
#endif
            if (!c) c = ggml_swiglu_split(ctx, product(b1, a), product(b2, a));
        }
        if (mlp) c = product(weights(down, k, n), c);
        if (moe) {
#ifdef GGML_UPSTREAM
            ggml_tensor * weighted = ggml_mul(ctx, c, router);
            const auto of_choice = [&](int64_t j) {
                return ggml_view_2d(ctx, weighted, k, m, weighted->nb[2], j * weighted->nb[1]);
            };
            c = of_choice(0);
            for (int64_t j = 1; j < top_k; j++) c = ggml_add(ctx, c, of_choice(j));
#else
            c = ggml_mul_multi_add(ctx, c, router);
#endif
        }
        graphs.push_back(ggml_new_graph(ctx));
        ggml_build_forward_expand(graphs.back(), c);
    }
    std::vector<ggml_cplan> plans;
    for (ggml_cgraph * graph : graphs) {
#ifdef GGML_UPSTREAM
        plans.push_back(ggml_graph_plan(graph, threads, nullptr));
#else
        plans.push_back(ggml_graph_plan(graph, threads));
#endif
        if (plans.back().work_size > work.size()) work.resize(plans.back().work_size);
    }
    for (ggml_cplan & plan : plans) plan.work_data = work.data();
    size_t runs = 0;
    const auto run = [&] {
        const size_t set = runs++ % sets;
        const auto start = std::chrono::steady_clock::now();
        if (ggml_graph_compute(graphs[set], &plans[set]) != GGML_STATUS_SUCCESS) std::exit(1);
        return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
    };

    for (size_t set = 0; set < sets; set++) run(); // the last one's C is the one that is written
    std::ofstream(operands + argv[1] + ".c", std::ios::binary).write(static_cast<const char *>(c->data), ggml_nbytes(c));
    std::printf("{\"weights_bytes\": %zu, \"sets\": %zu}\n", weights_bytes, sets);
    std::fflush(stdout);
    double seconds;
    while (std::scanf("%lf", &seconds) == 1) {
        const double budget = seconds * 1e6;
        std::vector<double> times;
        double total = run();
        if (total >= budget) {
            times.push_back(total);
        } else {
            total = 0;
        }
        while (total < budget) {
            times.push_back(run());
            total += times.back();
        }
        for (size_t i = 0; i < times.size(); i++) std::printf("%s%.3f", i ? ", " : "[", times[i]);
        std::printf("]\n");
        std::fflush(stdout);
    }
}
