// Prints the services that `docker compose up` would run here, as JSON: Compose's own parser with
// its environment, profiles and checks, without an engine. It decides nothing.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
)

func main() {
	options, err := cli.NewProjectOptions(os.Args[1:],
		cli.WithOsEnv,
		cli.WithEnvFiles(),
		cli.WithDotEnv,
		cli.WithDefaultProfiles(),
		cli.WithDefaultConfigPath,
	)
	exitOn(err)
	project, err := options.LoadProject(context.Background())
	exitOn(err)
	printed, err := project.MarshalJSON()
	exitOn(err)
	fmt.Println(string(printed))
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
