#![no_main]

shoal_fuzz::target!("ring");
