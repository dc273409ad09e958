# Fails unless the README's C block is quickstart.c.
file(READ "${CMAKE_CURRENT_LIST_DIR}/../README.md" readme)
file(READ "${CMAKE_CURRENT_LIST_DIR}/quickstart.c" program)
string(FIND "${readme}" "```c\n${program}```\n" at)
if(at EQUAL -1)
  message(FATAL_ERROR "README.md: its ```c block differs from examples/quickstart.c; paste the file there")
endif()
