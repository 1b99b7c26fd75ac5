#include "chunks.h"

#include "error.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#if defined(__unix__) || defined(__APPLE__)
#  define H2OG_HAS_MMAP 1
#  include <fcntl.h>
#  include <sys/mman.h>
#  include <unistd.h>
#endif

namespace h2og {

namespace {

constexpr size_t PAGE = 1 << 16;  // a multiple of every system's pages

constexpr size_t whole_pages(size_t n) { return (n + PAGE - 1)/PAGE*PAGE; }

} // namespace

Chunks::Chunks(size_t n, const std::string & folder) : bytes(whole_pages(n)) {
    if (folder.empty()) {
        return;
    }
#if defined(H2OG_HAS_MMAP)
    std::string name = folder + "/h2og-attic-XXXXXX";
    file = mkstemp(name.data());
    if (file < 0) {
        fail(H2OG_INVALID, "no file for evicted entries can be made in %s: %s", folder.c_str(), strerror(errno));
    }
    unlink(name.c_str());  // it is gone when it is closed, whatever happens to this process
#else
    fail(H2OG_UNSUPPORTED, "evicted entries cannot be kept in a file on this system, only in memory");
#endif
}

Chunks::~Chunks() {
#if defined(H2OG_HAS_MMAP)
    if (file >= 0) {
        for (char * chunk : mapped) {
            munmap(chunk, bytes);
        }
        close(file);
        return;
    }
#endif
    for (char * chunk : free) {
        std::free(chunk);
    }
}

char * Chunks::get() {
    if (!free.empty()) {
        char * chunk = free.back();
        free.pop_back();
        return chunk;
    }
    return file < 0 ? static_cast<char *>(std::malloc(bytes)) : extend_file();
}

// The blocks are taken on the disk at once: a full disk says so here, and not as a bus error when they are written to.
char * Chunks::extend_file() {
#if defined(H2OG_HAS_MMAP)
    const off_t at = off_t(mapped.size()*bytes);
#  if defined(__APPLE__)
    const bool has_room = ftruncate(file, at + off_t(bytes)) == 0;
#  else
    const bool has_room = posix_fallocate(file, at, off_t(bytes)) == 0;
#  endif
    void * chunk = has_room ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, at) : MAP_FAILED;
    if (chunk == MAP_FAILED) {
        return nullptr;
    }
    mapped.push_back(static_cast<char *>(chunk));
    return mapped.back();
#else
    return nullptr;
#endif
}

void Chunks::give_back(char * chunk) {
    if (file < 0) {
        std::free(chunk);
    } else {
        free.push_back(chunk);
    }
}

} // namespace h2og
