// No exception leaves C++: a function that can fail returns the message, to be freed with
// shoal_free, or null.

#pragma once

#include <cstring>
#include <exception>

// Runs `work` and converts an exception into a message.
template <typename Work>
char* guarded(Work work) {
  try {
    work();
    return nullptr;
  } catch (const std::exception& error) {
    return strdup(error.what());
  } catch (...) {
    return strdup("unknown C++ exception");
  }
}
