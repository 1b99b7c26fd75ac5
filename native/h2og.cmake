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

# One kernel an instruction set, chosen when it runs; everything else of ours is for the base of the architecture.
if(NOT MSVC)
    target_compile_options(h2og PRIVATE -ffp-contract=fast)
    if(is_x86_64)
        set_source_files_properties(native/src/attention-avx2.cpp PROPERTIES COMPILE_OPTIONS -march=x86-64-v3)
        # GCC's own header of AVX-512 reads what it leaves uninitialized.
        set(avx512 "-march=x86-64-v4;-Wno-uninitialized;$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>")
        set_source_files_properties(native/src/attention-avx512.cpp PROPERTIES COMPILE_OPTIONS "${avx512}")
        set_source_files_properties(native/src/attention-avx512vnni.cpp PROPERTIES COMPILE_OPTIONS "${avx512};-mavx512vnni")
    endif()
endif()

# The instructions that a single CPU backend is compiled for; of several the one that fits is loaded.
set(cpu_options "")
if(NOT MSVC AND GGML_NATIVE)
    include(CheckCXXCompilerFlag)
    check_cxx_compiler_flag(-march=native H2OG_HAS_MARCH_NATIVE)
    if(H2OG_HAS_MARCH_NATIVE)
        set(cpu_options -march=native)
    endif()
elseif(NOT MSVC AND NOT GGML_CPU_ALL_VARIANTS)
    set(flag_of_SSE42 -msse4.2)
    foreach(feature ${cpu_features})
        string(TOLOWER "${feature}" name)
        if(GGML_${feature} AND DEFINED flag_of_${feature})
            list(APPEND cpu_options ${flag_of_${feature}})
        elseif(GGML_${feature})
            list(APPEND cpu_options -m${name})
        endif()
    endforeach()
endif()

# Their names go into a file beside the libraries: bindings/cpu.py refuses a CPU that lacks one, which would otherwise end
# the process with an illegal instruction. The compiler knows them best; other CPUs than x86 name none.
set(H2OG_CPU_FEATURES "${CMAKE_BINARY_DIR}/bin/cpu-features.txt")
set(macros "")
if(NOT MSVC)
    separate_arguments(user_options UNIX_COMMAND "${CMAKE_CXX_FLAGS}")
    execute_process(COMMAND "${CMAKE_CXX_COMPILER}" ${user_options} ${cpu_options} -dM -E -x c++ /dev/null
        OUTPUT_VARIABLE macros ERROR_QUIET)
endif()
string(REGEX MATCHALL "__(SSE3|SSSE3|SSE4_[12]|AVX[0-9A-Z_]*|AMX_[0-9A-Z]+|BMI2?|FMA|F16C|LZCNT|MOVBE|POPCNT|GFNI|VAES)__ 1"
    names "${macros}")
list(TRANSFORM names REPLACE "^__(.*)__ 1$" "\\1")
list(TRANSFORM names TOLOWER)
list(SORT names)
list(JOIN names " " names)
file(CONFIGURE OUTPUT "${H2OG_CPU_FEATURES}" CONTENT "@names@\n" @ONLY)

# Built by default: the libraries, and nothing else of llama.cpp.
add_custom_target(runtime ALL DEPENDS ${H2OG_LIBRARIES})
