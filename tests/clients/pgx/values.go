package main

import (
	"math/big"
	"runtime/debug"
)

func bigInt(n int64) *big.Int {
	return big.NewInt(n)
}

// driverVersion is that of the pgx which is linked in.
func driverVersion() string {
	built, _ := debug.ReadBuildInfo()
	for _, module := range built.Deps {
		if module.Path == "github.com/jackc/pgx/v5" {
			return module.Version
		}
	}
	return "unknown"
}
