# Our sources, compiled apart from llama.cpp's (own warnings, no unity build) and linked into libllama.

file(GLOB H2OG_SOURCES CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/native/src/*.cpp")
add_library(h2og OBJECT ${H2OG_SOURCES})
target_sources(llama PRIVATE $<TARGET_OBJECTS:h2og>)
target_include_directories(llama PRIVATE # the patched files include our hooks
    "${CMAKE_CURRENT_SOURCE_DIR}/native/include" "${CMAKE_CURRENT_SOURCE_DIR}/native/src")

# What our sources and our native tests share: our warnings are errors, llama.cpp's private headers are not ours.
add_library(h2og-options INTERFACE)
target_include_directories(h2og-options INTERFACE
    "${CMAKE_CURRENT_SOURCE_DIR}/native/include" "${CMAKE_CURRENT_SOURCE_DIR}/native/src")
target_include_directories(h2og-options SYSTEM INTERFACE
    "${H2OG_LLAMA_DIR}/include" "${H2OG_LLAMA_DIR}/src"
    "${H2OG_LLAMA_DIR}/ggml/include" "${H2OG_LLAMA_DIR}/ggml/src")
target_compile_definitions(h2og-options INTERFACE
    H2OG_VERSION="${PROJECT_VERSION}" H2OG_LLAMA_VERSION="${H2OG_LLAMA_VERSION}" LLAMA_SHARED GGML_SHARED)
if(NOT MSVC)
    target_compile_options(h2og-options INTERFACE -Wall -Wextra -Wpedantic -Werror -fopenmp-simd)
endif()
if(H2OG_SANITIZE)
    target_compile_options(h2og-options INTERFACE -fsanitize=undefined -fno-sanitize-recover=undefined)
endif()
target_link_libraries(h2og PRIVATE h2og-options)
target_compile_definitions(h2og PRIVATE LLAMA_BUILD)

# One kernel an instruction set, chosen when it runs; everything else is for the base of the architecture.
if(NOT MSVC)
    target_compile_options(h2og PRIVATE -ffp-contract=fast)
    if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
        set_source_files_properties(native/src/attention-avx2.cpp PROPERTIES COMPILE_OPTIONS -march=x86-64-v3)
        # GCC's own header of AVX-512 reads what it leaves uninitialized.
        set_source_files_properties(native/src/attention-avx512.cpp PROPERTIES COMPILE_OPTIONS
            "-march=x86-64-v4;-Wno-uninitialized;$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>")
    endif()
endif()

# Built by default: the libraries, and nothing else of llama.cpp.
add_custom_target(runtime ALL DEPENDS ${H2OG_LIBRARIES})
