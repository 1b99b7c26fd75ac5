# Every native/tests/*.cpp and *.c is one test program, linked to the library it tests; native/bench has programs that measure it,
# which are run by hand.

file(GLOB tests CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/native/tests/*.cpp" "${CMAKE_CURRENT_SOURCE_DIR}/native/tests/*.c")
file(GLOB benchmarks CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/native/bench/*.cpp")
foreach(source ${tests} ${benchmarks})
    get_filename_component(name "${source}" NAME_WE)
    add_executable(${name} "${source}")
    target_link_libraries(${name} PRIVATE h2og-options llama)
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
    if(source IN_LIST tests)
        add_test(NAME ${name} COMMAND ${name})
        set_tests_properties(${name} PROPERTIES TIMEOUT 600 ENVIRONMENT
            "ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1;UBSAN_OPTIONS=print_stacktrace=1")
    endif()
endforeach()
