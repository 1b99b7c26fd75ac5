// Equal pieces of memory: on the heap, or in a file of their own that is mapped.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace h2og {

class Chunks {
public:
    // folder: where the file is made, which nobody else sees and which ends with this object; "": on the heap.
    Chunks(size_t bytes, const std::string & folder);
    ~Chunks();

    Chunks(const Chunks &) = delete;
    Chunks & operator=(const Chunks &) = delete;

    char * get();                  // nullptr: the memory or the disk is full
    void   give_back(char * chunk);

    const size_t bytes;

private:
    char * extend_file();

    int file = -1;                 // -1: on the heap
    std::vector<char *> free;
    std::vector<char *> mapped;    // all there are in the file
};

} // namespace h2og
