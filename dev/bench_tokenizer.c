// Encodes documents with data/models/bpe.c on one thread, for dev/bench_tokenizer.py: speed and ids
// beside Hugging Face's tokenizers.
//
// usage: bench_tokenizer TOKENIZER DOCUMENTS [IDS]
//        DOCUMENTS: of each its length in bytes, uint32, and the bytes. IDS, written: of each the
//        number of its ids, uint32, and the ids, uint32. Prints the seconds of encoding.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/base/clock.h"
#include "../data/base/error.h"
#include "../data/base/file.h"
#include "../data/base/json.h"
#include "../data/base/memory.h"
#include "../data/models/bpe.h"

static void encode(BpeEncoder *e, const unsigned char *text, uint32_t n, unsigned char *valid,
                   Error *err) {
    bpe_clear(e);
    const bool as_is = utf8_is_valid(text, n);
    const size_t size = as_is ? n : utf8_replace(text, n, valid);
    must(bpe_encode(e, as_is ? text : valid, size, err), err);
}

int main(int argc, char **argv) {
    Error err = {0};
    Tokenizer t;
    uint64_t bytes = 0;
    if (argc < 3)
        exit_with(EXIT_USAGE, "bench_tokenizer TOKENIZER DOCUMENTS [IDS]", "expected two paths");
    must(tokenizer_open(&t, argv[1], &err), &err);
    Bpe *bpe = bpe_open(&t, &err);
    must(bpe != NULL, &err);
    char *documents = file_read_all(argv[2], 1ull << 32, &bytes, "", &err);
    must(documents != NULL, &err);
    unsigned char *valid = host_calloc(bytes, 3, "text");
    FILE *out = argc > 3 ? fopen(argv[3], "wb") : NULL;
    BpeEncoder *e = bpe_encoder_open(bpe);
    const double start_ms = now_ms();
    uint64_t at = 0;
    while (at < bytes) {
        uint32_t n;
        size_t count;
        memcpy(&n, documents + at, sizeof n);
        encode(e, (unsigned char *)documents + at + sizeof n, n, valid, &err);
        at += sizeof n + n;
        if (!out) continue;
        const int32_t *ids = bpe_ids(e, &count);
        n = (uint32_t)count;
        fwrite(&n, sizeof n, 1, out);
        fwrite(ids, sizeof *ids, count, out);
    }
    printf("%.6f\n", (now_ms() - start_ms) * 1e-3);
    if (out && fclose(out) != 0) exit_with(EXIT_DISK, "", "%s: cannot write", argv[3]);
    bpe_encoder_close(e);
    bpe_close(bpe);
    tokenizer_free(&t);
    free(valid);
    free(documents);
    return EXIT_DONE;
}
