// The time of llama.cpp's forwards over 1 to 32 rows with the logits of all rows, as a draft's verification needs them, beside
// prefill and decoding. llama-bench computes the logits of a prompt's last row alone.
//
//     forward-cost MODEL THREADS REPETITIONS DEPTH PROMPT
//
// DEPTH: tokens that the context holds before each forward. PROMPT: tokens of the prefill, 0 for none, and then decoding is not
// timed either. `peers_engines.parse_forward_cost` reads the line that begins with "N:". How to build it: benchmarks/README.md.
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

static const int ROWS[] = {1, 2, 3, 4, 5, 6, 8, 12, 16, 32};
static const int MOST = 512, DECODED = 64, TURNS = 5;

static llama_context *context;
static llama_batch batch;
static int vocab_size;

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

static void print_errors(enum ggml_log_level level, const char *text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

// Seconds of a forward over random tokens behind `past` others, with the logits of all rows or of the last one.
static double forward(int rows, int past, bool all) {
    batch.n_tokens = rows;
    for (int row = 0; row < rows; row++) {
        batch.token[row] = rand() % vocab_size;
        batch.pos[row] = past + row;
        batch.n_seq_id[row] = 1;
        batch.seq_id[row][0] = 0;
        batch.logits[row] = all || row == rows - 1;
    }
    double start = seconds();
    if (llama_decode(context, batch)) {
        fputs("llama_decode failed\n", stderr);
        exit(1);
    }
    llama_synchronize(context);
    volatile float first = llama_get_logits_ith(context, rows - 1)[0];
    (void)first;
    return seconds() - start;
}

int main(int count, char **arguments) {
    if (count != 6) {
        fprintf(stderr, "usage: %s MODEL THREADS REPETITIONS DEPTH PROMPT\n", arguments[0]);
        return 2;
    }
    int threads = atoi(arguments[2]), repetitions = atoi(arguments[3]), depth = atoi(arguments[4]), prompt = atoi(arguments[5]);
    if (threads < 1 || repetitions < 1 || depth < 1 || depth > MOST || prompt < 0 || prompt > MOST) {
        fprintf(stderr, "wanted at least one thread and repetition, DEPTH 1 to %d, PROMPT 0 to %d\n", MOST, MOST);
        return 2;
    }
    llama_log_set(print_errors, nullptr);
    ggml_backend_load_all();
    llama_model *model = llama_model_load_from_file(arguments[1], llama_model_default_params());
    if (!model) return 1;
    llama_context_params wanted = llama_context_default_params();
    wanted.n_ctx = 2 * MOST + DECODED;
    wanted.n_batch = wanted.n_ubatch = MOST;
    wanted.n_threads = wanted.n_threads_batch = threads;
    context = llama_init_from_model(model, wanted);
    if (!context) return 1;
    vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    batch = llama_batch_init(MOST, 0, 1);
    llama_memory_t memory = llama_get_memory(context);
    printf("%s, %d threads; %s\n", arguments[1], threads, llama_print_system_info());
    forward(8, 0, true);  // warm

    std::vector<std::vector<double>> times(std::size(ROWS));
    std::vector<double> prefill, decode;
    for (int turn = 0; turn < repetitions; turn++) {
        if (prompt) {
            llama_memory_clear(memory, true);
            prefill.push_back(prompt / forward(prompt, 0, false));
        }
        llama_memory_clear(memory, true);
        forward(depth, 0, false);
        if (prompt) {
            double start = seconds();
            for (int token = 0; token < DECODED; token++) forward(1, depth + token, true);
            decode.push_back(DECODED / (seconds() - start));
            llama_memory_seq_rm(memory, 0, depth, -1);
        }
        for (int again = 0; again < TURNS; again++)
            for (size_t which = 0; which < std::size(ROWS); which++) {
                times[which].push_back(forward(ROWS[which], depth, true));
                llama_memory_seq_rm(memory, 0, depth, -1);
            }
    }
    printf("N: median ms (least)");
    for (size_t which = 0; which < std::size(ROWS); which++)
        printf("  %d: %.2f(%.2f)", ROWS[which], median(times[which]) * 1e3,
               *std::min_element(times[which].begin(), times[which].end()) * 1e3);
    puts("");
    if (prompt) printf("tokens/s: prefill %.1f, decoding %.2f\n", median(prefill), median(decode));
}
