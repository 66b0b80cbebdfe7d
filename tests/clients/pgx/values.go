package main

import (
	"math/big"
	"runtime/debug"
)

func bigInt(n int64) *big.Int {
	return big.NewInt(n)
}

// driverVersion returns the version of the linked pgx.
func driverVersion() string {
	built, _ := debug.ReadBuildInfo()
	for _, module := range built.Deps {
		if module.Path == "github.com/jackc/pgx/v5" {
			return module.Version
		}
	}
	return "unknown"
}
