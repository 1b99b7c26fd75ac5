// A failed CHECK prints where and what, and the test program ends with 1.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition, ...)                                                     \
    do {                                                                          \
        if (!(condition)) {                                                       \
            fprintf(stderr, "%s:%d: %s\n  ", __FILE__, __LINE__, #condition);     \
            fprintf(stderr, __VA_ARGS__);                                         \
            fprintf(stderr, "\n");                                                \
            exit(1);                                                              \
        }                                                                         \
    } while (0)
