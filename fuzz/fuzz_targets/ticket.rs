#![no_main]

shoal_fuzz::target!("ticket");
