//! The Shoal process: command line, configuration and the driver loop.
