#![no_main]

shoal_fuzz::target!("run_config");
