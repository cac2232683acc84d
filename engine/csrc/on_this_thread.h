// The thread that a backward pass runs on.

#pragma once

#include <c10/core/AutogradState.h>

// Runs all of a backward pass on this thread while it lives. libtorch has one thread for all graphs of a GPU, in which
// a device that waits for another one's gradients would hold that one up if both are the same GPU.
struct OnThisThread {
  bool before = c10::AutogradState::get_tls_state().get_multithreading_enabled();
  OnThisThread() { c10::AutogradState::get_tls_state().set_multithreading_enabled(false); }
  ~OnThisThread() { c10::AutogradState::get_tls_state().set_multithreading_enabled(before); }
};
