// The header is C: a C compiler takes it, and a C program can call what it declares.
#include "h2og.h"

#include <string.h>

int main(void) {
    h2og_params params = h2og_default_params();
    h2og_cache * cache = NULL;
    if (params.block != 64 || params.decay != 1.0f || params.budget != 0) {
        return 1;
    }
    if (h2og_attach(NULL, &params, &cache) != H2OG_INVALID || cache != NULL || strlen(h2og_last_error()) == 0) {
        return 2;
    }
    if (h2og_check(NULL) != H2OG_INVALID || h2og_evict(NULL, 0, NULL, 1) != H2OG_INVALID) {
        return 3;
    }
    h2og_detach(NULL);
    return strstr(h2og_version(), "llama-cpp-python") == NULL ? 4 : 0;
}
