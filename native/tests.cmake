# Every native/tests/*.cpp and *.c is one test program, linked to the library it tests; those of native/bench measure it.

file(GLOB tests CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/native/tests/*.cpp" "${CMAKE_CURRENT_SOURCE_DIR}/native/tests/*.c")
file(GLOB benchmarks CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/native/bench/*.cpp")
foreach(source ${tests} ${benchmarks})
    get_filename_component(name "${source}" NAME_WE)
    add_executable(${name} "${source}")
    target_link_libraries(${name} PRIVATE h2og-options llama)
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
    set(arguments)
    if(source IN_LIST benchmarks)
        set(arguments f16 1 1 64 64 1 1)  # that it runs is all there is to test
    endif()
    add_test(NAME ${name} COMMAND ${name} ${arguments})
    set_tests_properties(${name} PROPERTIES TIMEOUT 600 ENVIRONMENT
        "ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1;UBSAN_OPTIONS=print_stacktrace=1")
endforeach()
