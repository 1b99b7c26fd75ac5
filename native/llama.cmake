# Fetches, unpacks, patches and adds llama.cpp, as it ships inside llama-cpp-python's source archive.
# After this: targets llama, ggml, ggml-base and the backends; H2OG_LLAMA_DIR (llama.cpp), H2OG_LLAMA_CPP_PYTHON_DIR.

set(H2OG_LLAMA_VERSION "0.3.36")
set(H2OG_LLAMA_SHA256 "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e")
set(H2OG_LLAMA_SDIST "" CACHE FILEPATH "llama_cpp_python-${H2OG_LLAMA_VERSION}.tar.gz, for builds without a network")
set(H2OG_LLAMA_SDIST_DIR "${CMAKE_BINARY_DIR}/llama-sdist" CACHE PATH "Folder the archive is fetched into otherwise")

set(scripts "${CMAKE_CURRENT_SOURCE_DIR}/scripts")
set(patches "${CMAKE_CURRENT_SOURCE_DIR}/native/patches")

# --- unpack: only what the libraries and the Python package need, once
set(H2OG_LLAMA_CPP_PYTHON_DIR "${CMAKE_BINARY_DIR}/llama-src/llama_cpp_python-${H2OG_LLAMA_VERSION}")
set(H2OG_LLAMA_DIR "${H2OG_LLAMA_CPP_PYTHON_DIR}/vendor/llama.cpp")
set(stamp "${CMAKE_BINARY_DIR}/llama-src/unpacked")
set(unpacked "")
if(EXISTS "${stamp}")
    file(READ "${stamp}" unpacked)
endif()
if(NOT unpacked STREQUAL H2OG_LLAMA_SHA256)
    execute_process(
        COMMAND "${Python_EXECUTABLE}" "${scripts}/fetch_sdist.py" "${H2OG_LLAMA_VERSION}" "${H2OG_LLAMA_SHA256}"
                "${H2OG_LLAMA_SDIST_DIR}" "${H2OG_LLAMA_SDIST}"
        OUTPUT_VARIABLE sdist OUTPUT_STRIP_TRAILING_WHITESPACE
        ERROR_VARIABLE error RESULT_VARIABLE failed)
    if(failed)
        message(FATAL_ERROR "The source of llama.cpp could not be had.\n${error}")
    endif()
    message(STATUS "Unpacking ${sdist}")
    file(REMOVE_RECURSE "${CMAKE_BINARY_DIR}/llama-src")
    set(top "llama_cpp_python-${H2OG_LLAMA_VERSION}")
    file(ARCHIVE_EXTRACT INPUT "${sdist}" DESTINATION "${CMAKE_BINARY_DIR}/llama-src" PATTERNS
        "${top}/LICENSE.md" "${top}/llama_cpp/*"
        "${top}/vendor/llama.cpp/CMakeLists.txt" "${top}/vendor/llama.cpp/LICENSE"
        "${top}/vendor/llama.cpp/cmake/*" "${top}/vendor/llama.cpp/ggml/*" "${top}/vendor/llama.cpp/include/*"
        "${top}/vendor/llama.cpp/src/*" "${top}/vendor/llama.cpp/vendor/*")
    file(WRITE "${stamp}" "${H2OG_LLAMA_SHA256}")
endif()

# --- patch: files that stay the same are not written, so a changed patch recompiles what it touches
execute_process(
    COMMAND "${Python_EXECUTABLE}" "${scripts}/apply_patches.py"
            "${H2OG_LLAMA_DIR}" "${CMAKE_BINARY_DIR}/llama-src/pristine" "${patches}"
    ERROR_VARIABLE error RESULT_VARIABLE failed)
if(failed)
    message(FATAL_ERROR "Our hooks could not be inserted into llama.cpp.\n${error}")
endif()
file(GLOB patch_files CONFIGURE_DEPENDS "${patches}/*.patch")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    ${patch_files} "${scripts}/apply_patches.py" "${scripts}/fetch_sdist.py")

# --- options: the libraries alone. Everything else (-DGGML_CUDA=ON, ...) passes through.
set(BUILD_SHARED_LIBS ON)
foreach(part COMMON TESTS TOOLS EXAMPLES SERVER APP UI MTMD)
    set(LLAMA_BUILD_${part} OFF)
endforeach()
set(LLAMA_BUILD_NUMBER 0)
set(LLAMA_BUILD_COMMIT "llama-cpp-python-${H2OG_LLAMA_VERSION}")
# llama.cpp asks git for its commit: keep git from answering with ours, which would recompile with every commit.
set(ENV{GIT_CEILING_DIRECTORIES} "${CMAKE_BINARY_DIR}")
set(LLAMA_ALL_WARNINGS OFF)

# A plain build uses all this CPU can do, as llama.cpp does. Off (wheels): the base of the architecture, and on x86-64 some of
# llama.cpp's CPU variants as libraries of their own, the best of which is loaded when it runs.
if(NOT DEFINED GGML_NATIVE)
    set(GGML_NATIVE ON CACHE BOOL "Use every instruction of this machine's CPU")
endif()
# Names of ggml/src/CMakeLists.txt: any x86-64, then from 2008, 2013 and 2019 on. All fourteen take five times as long.
set(H2OG_CPU_VARIANTS "x64;sse42;haswell;icelake" CACHE STRING "CPU variants that a build for other machines has")
set(is_x86_64 OFF)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    set(is_x86_64 ON)
endif()
if(is_x86_64 AND UNIX AND NOT GGML_NATIVE AND NOT DEFINED GGML_BACKEND_DL)
    set(GGML_BACKEND_DL ON)
    set(GGML_CPU_ALL_VARIANTS ON)
endif()
set(cpu_features SSE42 AVX AVX2 BMI2 FMA F16C)
foreach(feature ${cpu_features})
    if(NOT DEFINED CACHE{GGML_${feature}})
        # Set here, because llama.cpp caches a default that depends on the GGML_NATIVE of the first configuration.
        set(GGML_${feature} OFF)
    endif()
endforeach()

# OpenMP where the build stays on this machine: its threads wake at once, where ggml's own now and then share a core for
# some milliseconds. A wheel does without, since it would need libgomp, which a machine without a compiler lacks.
if(NOT DEFINED GGML_OPENMP AND (NOT GGML_NATIVE OR H2OG_SANITIZE))
    set(GGML_OPENMP OFF)
endif()

add_subdirectory("${H2OG_LLAMA_DIR}" llama.cpp EXCLUDE_FROM_ALL)

# --- the libraries that were configured, without version links (a wheel would hold each three times)
set(H2OG_LIBRARIES llama ggml ggml-base)
foreach(backend ${GGML_AVAILABLE_BACKENDS})
    if(TARGET ${backend})
        list(APPEND H2OG_LIBRARIES ${backend})
    endif()
endforeach()
list(REMOVE_DUPLICATES H2OG_LIBRARIES)
if(APPLE)
    set(origin "@loader_path")
else()
    set(origin "$ORIGIN")
endif()
foreach(library ${H2OG_LIBRARIES})
    set_property(TARGET ${library} PROPERTY VERSION)
    set_property(TARGET ${library} PROPERTY SOVERSION)
    set_property(TARGET ${library} PROPERTY PUBLIC_HEADER)  # llama.cpp's headers are not installed
    set_target_properties(${library} PROPERTIES BUILD_RPATH "${origin}" INSTALL_RPATH "${origin}")
    get_target_property(type ${library} TYPE)
    if(type STREQUAL "SHARED_LIBRARY" AND NOT library STREQUAL "llama")
        # The dynamic linker knows libraries by name: another package's libggml in the same process must not stand in.
        set_target_properties(${library} PROPERTIES OUTPUT_NAME "h2og-${library}")
    endif()
endforeach()

if(H2OG_SANITIZE)
    target_compile_definitions(ggml PRIVATE NDEBUG)  # its debug build prints to stderr as it is loaded
endif()
