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

# The kernels use the instructions ggml's CPU backend is compiled for.
if(NOT MSVC)
    if(GGML_NATIVE)
        include(CheckCXXCompilerFlag)
        check_cxx_compiler_flag(-march=native H2OG_HAS_MARCH_NATIVE)
        if(H2OG_HAS_MARCH_NATIVE)
            target_compile_options(h2og PRIVATE -march=native)
        endif()
    else()
        set(flag_of_SSE42 -msse4.2)
        foreach(feature ${cpu_features})
            string(TOLOWER "${feature}" name)
            if(GGML_${feature} AND DEFINED flag_of_${feature})
                target_compile_options(h2og PRIVATE ${flag_of_${feature}})
            elseif(GGML_${feature})
                target_compile_options(h2og PRIVATE -m${name})
            endif()
        endforeach()
    endif()
endif()

# Built by default: the libraries, and nothing else of llama.cpp.
add_custom_target(runtime ALL DEPENDS ${H2OG_LIBRARIES})
