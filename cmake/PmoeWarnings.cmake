# Flags every target of this project is built with.
add_library(pmoe_warnings INTERFACE)
target_compile_options(pmoe_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:C>:-Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wconversion -Wno-sign-conversion>)

if(PMOE_SANITIZE STREQUAL "address")
  set(pmoe_sanitize_flags -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
elseif(PMOE_SANITIZE STREQUAL "thread")
  set(pmoe_sanitize_flags -fsanitize=thread -fno-omit-frame-pointer)
elseif(PMOE_SANITIZE)
  message(FATAL_ERROR "PMOE_SANITIZE is \"${PMOE_SANITIZE}\"; address or thread was expected")
endif()
if(pmoe_sanitize_flags)
  add_compile_options(${pmoe_sanitize_flags})
  add_link_options(${pmoe_sanitize_flags})
  add_compile_definitions(PMOEI_NO_CLONES)
endif()
