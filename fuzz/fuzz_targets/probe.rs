#![no_main]

shoal_fuzz::target!("probe");
