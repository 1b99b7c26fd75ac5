// Errors inside the native part: one exception type that carries the status of the C edge.
#pragma once

#include "h2og.h"

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace h2og {

class Error : public std::runtime_error {
public:
    Error(int32_t status, const std::string & text) : std::runtime_error(text), status(status) {}

    const int32_t status;
};

[[noreturn]] __attribute__((format(printf, 2, 3)))
inline void fail(int32_t status, const char * format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    throw Error(status, text);
}

// Remembers text as h2og_last_error() of this thread.
void set_last_error(const std::string & text);

// Runs f; turns whatever it throws into a status and a last error.  f returns an integer.
template <typename F>
auto guarded(F && f) noexcept -> decltype(f()) {
    using R = decltype(f());
    try {
        set_last_error("");
        return f();
    } catch (const Error & e) {
        set_last_error(e.what());
        return static_cast<R>(e.status);
    } catch (const std::exception & e) {
        set_last_error(e.what());
        return static_cast<R>(H2OG_NATIVE);
    } catch (...) {
        set_last_error("unknown native error");
        return static_cast<R>(H2OG_NATIVE);
    }
}

} // namespace h2og
