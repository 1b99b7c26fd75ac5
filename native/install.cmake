# Into the Python package: the libraries, the C header, and llama-cpp-python's Python files.
#
# llama-cpp-python is on PyPI as source only, so requiring it would make everybody compile llama.cpp a second time.
# Its Python files are placed in a folder of their own, which h2o_gguf.pth appends to sys.path: `import llama_cpp`
# finds them unless the user has installed llama-cpp-python, and finds our libraries where it looks for its own.

set(vendor h2o_gguf/_vendor)
install(TARGETS ${H2OG_LIBRARIES} LIBRARY DESTINATION ${vendor}/llama_cpp/lib RUNTIME DESTINATION ${vendor}/llama_cpp/lib)
install(FILES "${H2OG_CPU_FEATURES}" DESTINATION ${vendor}/llama_cpp/lib)
install(DIRECTORY "${H2OG_LLAMA_CPP_PYTHON_DIR}/llama_cpp" DESTINATION ${vendor}
    FILES_MATCHING PATTERN "*.py" PATTERN "py.typed" PATTERN "lib" EXCLUDE)
install(FILES "${H2OG_LLAMA_CPP_PYTHON_DIR}/LICENSE.md" DESTINATION ${vendor} RENAME LICENSE-llama-cpp-python.md)
install(FILES "${H2OG_LLAMA_DIR}/LICENSE" DESTINATION ${vendor} RENAME LICENSE-llama.cpp)
install(FILES native/h2o_gguf.pth DESTINATION .)
install(FILES native/include/h2og.h DESTINATION h2o_gguf/include)
